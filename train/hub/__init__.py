"""Publishing on the Hugging Face Hub.

publish.py       a draft or a sampled set as a checked folder
upload.py        the folder to the Hub, with a version tag
model_card.py    the card of a draft; card_text.py its sentences, card_tables.py its tables and figures,
                 card.md.j2 its template
dataset_card.py  the shards and the card of a sampled set; dataset_card.md.j2 its template
serving.py       with how many tokens a draft is served, and each engine's files for it
evidence.py      what was measured of a draft: each file, its type, and what it must be about
redaction.py     removes local paths; finds secrets and pickles

Training can publish its draft as well (--publish.repo), so this is in train/. It may import train/settings,
train/data, train/families, eval/ and decode/.
"""
