"""Training of drafts by distillation from the target.

    sample.py         command: the target answers prompts, or texts are tokenised as they are; writes the sampled set
    doctor.py         command: examines a sampled set or prompts: loss mask in colour, findings with their cost
    write_prompts.py  command: a chat model writes prompts, where no data set of them is at hand
    distill.py        command: trains a draft on sampled sets
    answering.py      what sample.py does
    prompt_writing.py what write_prompts.py does
    training.py       what distill.py does: the parts of a run are loaded, and the draft is trained
    states_server.py  command: starts a server that writes the target's hidden states for distill.py
    settings/         the settings of data and training, which load no torch
    data/             prompts, tokenised conversations, the sampled set on disk, mixtures, batches
    sampling/         the sampled set is written: rows, the local engine, servers with OpenAI's API
    doctor_checks/    the checks of doctor.py: boundaries, template, answers, prompts, texts
    losses/           divergences between target and draft distributions, and the loss made of them
    teacher/          the target's hidden states and logits for a batch: computed live, by a server, or read from disk
    families/         one trainer for each draft family
    trainer/          the training loop, checkpoints, logging, several processes
    planning/         estimates of memory, time and disk, and the dry run
    hub/              model cards and publishing

Import order: settings <- data <- losses <- teacher <- families <- trainer <- planning <- training.py. sampling and
doctor_checks import data, hub data and families. train may import decode and eval, never scripts.
"""
