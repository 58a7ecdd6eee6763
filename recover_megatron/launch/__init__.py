"""recover-run: the supervisor that starts the workers of a training job on one node and stays with them to the end.

``python -m recover_megatron.launch`` is the same command.  docs/launcher.md is its manual.  Everything here is standard
library only, except store.py, which imports torch when the store is made.

Modules, from the outside in::

    __main__      the command: parse, check, supervise, exit
    arguments     the flags, and every check that can be made before a process is started
    plan          what is started: ranks, addresses, ids; the workers' environment variables
    supervisor    the state machine of the launch and of its workers
    nodes         what the launchers of several nodes tell each other, as events of the supervisor's loop
    loop          one selector: pipes, pidfds, signals, timers, calls from other threads
    processes     start a process that dies with the launcher; find and kill what is left of it
    exec_worker   the few lines that run in a new process before the user's script
    warden        a second process that ends every worker when the launcher is killed
    warm_client, warm, run_script   --warm: one parent imports, then forks the workers
    output        workers' output: prefixes, log files, bounded memory
    workers_file  workers.json
    store         the torch TCPStore, and the launchers' messages in it
    exit_codes    the exit code of recover-run from what became of the workers
    states        the names of the states
"""
