"""recover-run: the supervisor that starts the workers of a training job on one node and stays with them to the end.

``python -m recover_megatron.launch`` is the same command.  docs/launcher.md is its manual.  Everything here is standard
library only, except nodes/store.py and the device's test, which import torch when it is needed, and psutil in
command_line/plan.py.

Modules, from the outside in::

    __main__, command               the command: parse, check, supervise, exit
    slurm                           the environment of a SLURM step
    command_line/
        arguments, readers          the command line and the environment, with all checks made before a process starts
        preflight, forecast         the script's own flags: what is wrong; what the loss of a node would cost
        plan                        what is started: ranks, addresses, ids; the workers' environment
    supervisor                      decides: the state machine of the launch, and its main loop
    messages                        the sentences printed: pure
    conclusion                      what the loss of a worker means until the training has begun; the exit code
    workers/
        states                      the states of workers and of the launch: pure
        loop                        one selector: pipes, pidfds, signals, timers, calls from other threads
        worker_table                the workers' records and processes; how they are told to end, and made to
        processes, exec_worker      start a process that dies with the launcher; find and kill what is left of it
        dying                       notices that a worker is about to die, and how, before it has gone
        reaper                      ... when the launcher has been killed; reads the output while it does not run
        successors                  workers that are started while the run goes on; those that come too late
        output                      workers' output: prefixes, log files, bounded memory
        log_folder                  what is written there: the lock, workers.json, the secret, the logs
    device_test                     the test of a replacement's device
    nodes/
        control_plane               the job's coordinator: the launcher's session with it
        hosted                      the processes beside the workers: candidate coordinators, metrics and events
        leasing                     whether the candidates share a lease, and have a witness
        peers, host, guest          the launchers of other nodes: what is done about them, what is said to them
        store                       the torch TCPStore and its socket; what is believed of what is in it
"""
