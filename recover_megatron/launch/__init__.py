"""recover-run: the supervisor that starts the workers of a training job on one node and stays with them to the end.

``python -m recover_megatron.launch`` is the same command.  docs/launcher.md is its manual.  Everything here is standard
library only, except store.py, which imports torch when the store is made.

Modules, from the outside in::

    __main__, command               the command: parse, check, supervise, exit
    arguments, listener, script     every check that can be made before a process is started; the store's socket
    plan                            what is started: ranks, addresses, ids; the workers' environment variables
    supervisor                      decides: the state machine of the launch, and its main loop
    states, exit_codes, messages    the names of the states, the exit code, the sentences printed: pure
    loop, launch_signals            one selector: pipes, pidfds, signals, timers, calls from other threads
    worker_table                    the workers' records and processes
    worker_environment, interfaces  what they find in their environment, and over which network they talk
    processes, exec_worker          start a process that dies with the launcher; find and kill what is left of it
    subreaper, reaper               ... while the launcher lives; ... when it has been killed
    stand_in                        the reaper reads the workers' output while the launcher does not run
    start_up                        what the loss of a worker means until the training has begun
    newcomers, late_newcomers       workers that are started while the run goes on; those that come too late
    output, sink                    workers' output: prefixes, log files, bounded memory
    log_folder                      what is written there: folder_lock, workers_file, secret_file, the logs
    control_plane, hosted           the job's coordinator: the launcher's session with it, the candidates hosted here
    peers, nodes, host, guest       the launchers of other nodes: what is done about them, what is said to them
    candidates, seal, store         where each hosts a candidate, what is believed of them, the torch TCPStore
    shape                           what others' environments say of it: torchrun's, MPI's
    slurm, slurm_launch             what SLURM's environment says: pure; and the launch that follows from it
    last_checkpoint                 named when a launch fails
"""
