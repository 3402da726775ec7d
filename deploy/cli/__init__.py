"""The command line, and what its commands print.

    main.py ─► commands/    options and arguments, a file for each group
                  │
                  ├─► headway.deploy.roles                the roles' own work
                  └─► what is printed around it:
                      runs.py, scaling.py, top.py, dashboard.py, ending.py, pages.py
                      models.py, chat.py
                      doctor.py, acl.py, algorithm_pages.py, data_pages.py, memory_pages.py, stage_memory.py

The invariant: a command parses its arguments before it imports a large package, so `--help` and a wrong option answer
at once. It ends with one paragraph and an exit code, never with a traceback for what a user can mend.
"""
