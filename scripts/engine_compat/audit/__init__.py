"""The audit of a draft that an engine serves (scripts/audit.py): which way of reading its files gives what is served?

reading.py         one reading of a draft's files, and edits that suspects share
eagle_suspects.py  suspects of EAGLE heads
suspects.py        the suspects of each family
decoding.py        each reading decoded here; what an engine served
naming.py          which suspects the counts and the checker's rules name
draft_audit.py     the whole audit of one draft

reading <- eagle_suspects <- suspects <- draft_audit; reading <- decoding <- naming <- draft_audit.
"""
