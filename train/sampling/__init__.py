"""Writing a sampled set: who answers the prompts, and how conversations become rows.

    config.py          SampleConfig, the settings of train/sample.py
    engine_choice.py   which engine answers, and settings that are of another one
    rows.py            a conversation while its replies are generated; its row; shards
    local_engine.py    answers of this project's engine
    server_engine.py   answers of a server with OpenAI's API, and the token ids that were sampled, if they are known

May import decode, eval, train.settings and train.data.
"""
