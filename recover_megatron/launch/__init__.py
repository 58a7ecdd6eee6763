"""recover-run: the supervisor that starts the workers of a training job on one node and watches them until they end.

``python -m recover_megatron.launch`` is the same command.  docs/operations.md is its manual.  The package
needs only the standard library, with two exceptions: nodes/store.py and device_test.py import torch when it is needed,
and nodes/addresses.py imports psutil.

Modules, from the outside in::

    __main__, command               the command: parse, check, supervise, exit
    slurm                           the environment of a SLURM step
    command_line/
        arguments, readers          the command line and the environment, with all checks before a process starts
        script, spec                the script and its flags; the launch: one record that all other modules read
        preflight, forecast         mistakes in the script's flags; what the loss of a node would cost
    supervisor                      decides: the state machine of the launch, and its main loop
    messages                        the log lines: pure functions
    conclusion                      handles the loss of a worker before the training begins; chooses the exit code
    workers/
        states                      the states of workers and of the launch: pure
        signals                     how signals are received, and what each does; the loop is network/event_loop
        environment                 the environment of a worker
        worker_table                the workers' records and processes, and their shutdown
        processes, exec_worker      start processes that die with the launcher; find and kill their descendants
        dying                       notices early, before a worker's process has ended, that it is dying, and why
        reaper                      a process that kills the workers if the launcher is killed, and reads their output
                                    while the launcher is stopped
        successors                  workers that are started during the run; newcomers that are too late
        prepared                    a process that is started before a replacement is needed
        output                      workers' output: prefixes, log files, bounded memory
        log_folder                  files in the log folder: the lock, workers.json, the secret, the logs
    device_test                     the test of a replacement's device
    nodes/
        addresses                   addresses and interfaces of this host and of the candidate coordinators
        control_plane               the launcher's session with the run's coordinator
        hosted                      processes next to the workers: candidate coordinators; exporter (metrics, events)
        leasing                     the lease and the witness of the candidates
        peers, host, guest          the messages between the launchers of the nodes
        store                       the torch TCPStore, its socket, and the authentication of its values
"""
