"""recover-run: the supervisor that starts the workers of a training job on one node and stays with them to the end.

``python -m recover_megatron.launch`` is the same command.  docs/launcher.md is its manual.  Everything here is standard
library only, except store.py, which imports torch when the store is made.

Modules, from the outside in::

    __main__, command               the command: parse, check, supervise, exit
    arguments, listener             every check that can be made before a process is started; the store's socket
    plan                            what is started: ranks, addresses, ids; the workers' environment variables
    supervisor                      the state machine of the launch and of its workers
    states, exit_codes, messages    the names of the states, the exit code, the sentences printed: pure
    loop                            one selector: pipes, pidfds, signals, timers, calls from other threads
    processes, exec_worker          start a process that dies with the launcher; find and kill what is left of it
    warden                          a second process that ends every worker when the launcher is killed
    output                          workers' output: prefixes, log files, bounded memory
    workers_file                    workers.json
    peers, nodes, store             the launchers of other nodes, what they say to each other, the torch TCPStore
    control_plane, candidates       the job's coordinator, and where each node hosts a candidate for it
    slurm, slurm_launch             what SLURM's environment says: pure; and the launch that follows from it
"""
