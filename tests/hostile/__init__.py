"""Bad input to every command, as tables: each case must end with one line of advice and leave every file as it was.

lab.py          a folder with small working runs of the commands, and the settings that they were made with
case.py         a case, and the check that every case must pass
files.py        what a case writes or damages before the command starts
test_*.py       the tables, by kind of mistake

The commands run in this process through `run_command`, so that hundreds of cases take less than a minute.
"""
