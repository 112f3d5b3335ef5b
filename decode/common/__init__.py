"""What every package needs and no model: command lines, output folders, files, errors and progress.

- errors: UserError; what a full disk or a missing permission is, and other exceptions, in one line
- settings: settings of a command from defaults, YAML and the command line, by today's names and by old ones
- target_settings: the settings of the target that commands share, of its sampling and of grammars
- target_record: how results name the target that they are of, and whether it is another one by now
- ranges: the range of every number in the settings, and the one check of them
- command: how a command starts and ends: signals, exit codes, one line for every foreseeable error
- run_dir: the output folder of a run: whose it is, and no file lost that is another's
- journal: every finished measurement, line by line on disk
- lock: one process at a time writes into a folder, one request at a time decodes with a model or a draft
- provenance: command line, commit, versions and hardware of a result
- files: atomic writing; text, JSON and YAML read with one-line errors that name the file; where assets/, configs/ lie
- damage: damaged files are moved aside, and what is intact in them is kept
- typed_json: dataclasses as JSON files, and files of earlier versions back as dataclasses
- published: what of a dataclass is published, as its fields say
- machine: what the process may use of its machine (CPUs, memory, a folder for what is cached), and who started it
- proxies: which proxy of the environment a request goes through
- progress: bars in a terminal, plain lines in a log; durations and sizes in words
- chat_template: a prompt or a chat as token ids
- template_choice: which chat template renders prompts, and with which arguments
- secret_patterns: the known forms of tokens, keys and passwords, to find them and to leave them out of messages

It imports no other package of this repository.
"""
