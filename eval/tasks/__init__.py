"""Prompt sets as token ids.

- loading: a task's prompts, first and later turns. dataset_specs: assets/tasks/*.yaml and the readers of data files.
- row_forms: which columns of a row are its prompt, answer and tools, for training too.
- row_files: the files and data sets that rows come from.
- stop_strings: ends answers at a task's stop strings.

May import eval.settings and decode.
"""
