"""What is taken out of the package, and which tests must then go red.

`test_removals.py` applies each row to a copy of the tree. The text must be found
exactly once in its file, and what is left must still be readable: a row that only
breaks the syntax proves nothing.
"""

from dataclasses import dataclass

T1 = "test_multinode_t1_version_guard.py::"
T2 = "test_multinode_t2_single_node.py::"
T3 = "test_multinode_t3_shape.py::"
T4 = "test_multinode_t4_rank_script.py::"
T5 = "test_multinode_t5_seam.py::"
PLAN = "test_plan.py::"
WATCHED = "test_watch.py::"
SHOWN = "test_cli_render.py::"
LAUNCHED = "test_cli_launch.py::"
SERVED = "test_cli_serve.py::"
CONNECTED = "test_cli_connect.py::"
QUOTING = "test_quoting.py::"

NO_LAUNCH = T1 + "test_no_multi_node_launch"
OURS = T2 + "test_multi_node_vllm_is_ours"
VEC_INFS = T2 + "test_everything_else_is_vec_infs"
STEP = T3 + "test_the_step_as_it_was_started"
ENGINE = T3 + "test_the_engine_of_each_rank"
OUTER_JOB = T4 + "test_submitted_from_inside_a_job[run]"


@dataclass(frozen=True)
class Removal:
    """One row.

    Parameters
    ----------
    name : str
        What is missed.
    file : str
        File below the package.
    old, new : str
        Text that is taken out, and what takes its place.
    tests : tuple of str
        Node ids below ``tests/``; each of them must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def row(name: str, file: str, old: str, new: str, *tests: str) -> Removal:
    """One row of the table."""
    return Removal(name, file, old, new, tests)


LAUNCHER, SEAM, RENDER = "launcher.py", "seam.py", "render.py"
BATCH, RANK, COMMON = "scripts/batch.sh", "scripts/rank.sh", "scripts/common.sh"
SUBMIT = "scripts/submit.sh"
PLAN_PY = "plan.py"
WATCH, PREVIEW, SLURM = "watch.py", "preview.py", "slurm.py"
CLI_COMMON, CLI_SIGNALS = "cli/common.py", "cli/signals.py"
CLI_CONNECT, CLI_LAUNCH, CLI_SERVE = "cli/connect.py", "cli/launch.py", "cli/serve.py"
CLI_STAGES = "cli/stages.py"

REMOVALS = [
    # ------------------------------------------------------------ T1
    row(
        "the check",
        LAUNCHER,
        "    if not report.ok:\n        raise SeamError(report.message())\n",
        "    del report\n",
        f"{NO_LAUNCH}[version]",
        f"{NO_LAUNCH}[no-metadata]",
    ),
    row(
        "the version",
        SEAM,
        "return self.installed == self.required and not self.missing",
        "return not self.missing",
        f"{NO_LAUNCH}[version]",
        f"{NO_LAUNCH}[no-metadata]",
    ),
    row(
        "the members",
        SEAM,
        "return self.installed == self.required and not self.missing",
        "return self.installed == self.required",
        f"{NO_LAUNCH}[method]",
        f"{NO_LAUNCH}[status-method]",
    ),
    row(
        "the launcher's own check",
        LAUNCHER,
        "        _require_vec_inf()\n        self.settings =",
        "        self.settings =",
        f"{NO_LAUNCH}[version]",
    ),
    row(
        "all but one missing member",
        SEAM,
        'text += " Missing or changed: " + "; ".join(self.missing) + "."',
        'text += " Missing or changed: " + self.missing[0] + "."',
        f"{NO_LAUNCH}[two]",
    ),
    row(
        "the installed version in the message",
        SEAM,
        "f\"found {self.installed or 'none'}; nothing was submitted.\"",
        '"found another; nothing was submitted."',
        f"{NO_LAUNCH}[version]",
        f"{NO_LAUNCH}[no-metadata]",
    ),
    row(
        "an import that never fails",
        LAUNCHER,
        "    try:\n        return getattr(import_module(module), name)\n"
        "    except Exception:\n        return fallback\n",
        "    return getattr(import_module(module), name)\n",
        T1 + "test_the_report_names_every_missing_member[launcher-class]",
        T1 + "test_import_without_a_usable_vec_inf[no-vec-inf]",
    ),
    row(
        "single-node launches on another vec-inf",
        LAUNCHER,
        "    stock = partial(client.launch_model, model_name, options=options)\n",
        "    _require_vec_inf()\n"
        "    stock = partial(client.launch_model, model_name, options=options)\n",
        T1 + "test_single_node_launches_as_before[version]",
    ),
    row(
        "the parameters of members",
        SEAM,
        "return self._wrong_parameters(value) or self._wrong_keys(value)",
        "return self._wrong_keys(value)",
        T1 + "test_the_report_names_every_missing_member[parameter]",
        T5 + "test_a_parameter_that_is_renamed_is_named",
    ),
    row(
        "the keys of members",
        SEAM,
        "return self._wrong_parameters(value) or self._wrong_keys(value)",
        "return self._wrong_parameters(value)",
        T1 + "test_the_report_names_every_missing_member[template-key]",
        T5 + "test_a_key_that_is_renamed_is_named",
    ),
    # ------------------------------------------------------------ T2
    row(
        "routing: everything",
        LAUNCHER,
        "    if not is_multinode_vllm(route):\n",
        "    if False:\n",
        f"{VEC_INFS}[venv]",
    ),
    row(
        "routing: nothing",
        LAUNCHER,
        "    if not is_multinode_vllm(route):\n",
        "    if True:\n",
        f"{OURS}[no-module-command]",
    ),
    row(
        "routing: the engine",
        "plan.py",
        'return int(params["num_nodes"]) > 1 and (params.get("engine") or ENGINE) == '
        "ENGINE",
        'return int(params["num_nodes"]) > 1',
        f"{VEC_INFS}[venv]",
        T2 + "test_the_launcher_is_vec_infs_for_other_params[two-nodes-sglang-given1]",
    ),
    row(
        "routing: the catalog",
        LAUNCHER,
        "        entry = _catalog_entry(client, model_name, request)\n",
        "        entry = None\n",
        T2 + "test_multi_node_vllm_outside_the_container_is_refused",
    ),
    row(
        "one warning only",
        LAUNCHER,
        '"warnings": SimpleNamespace(warn=lambda *args, **kwargs: None),',
        "",
        f"{VEC_INFS}[no-module-command]",
    ),
    row(
        "the same options object",
        LAUNCHER,
        "    stock = partial(client.launch_model, model_name, options=options)\n",
        "    same = type(options)(**vars(options)) if options else None\n"
        "    stock = partial(client.launch_model, model_name, options=same)\n",
        T2 + "test_routing_agrees_with_vec_inf[function-one-node-given0-False]",
    ),
    row(
        "a copy of the request",
        LAUNCHER,
        'given = {k: v for k, v in (kwargs or {}).items() if k != "engine" or v}',
        "given = kwargs",
        PLAN + "test_nothing_of_the_caller_is_changed",
    ),
    row(
        "vec-inf's script for other params",
        LAUNCHER,
        "        self.plan: Optional[LaunchPlan] = None\n"
        "        if not is_multinode_vllm(params):\n            return\n",
        "        self.plan: Optional[LaunchPlan] = None\n",
        T2 + "test_the_generator_is_vec_infs_for_other_params[one-node-given0]",
    ),
    # ------------------------------------------------------------ T3
    row(
        "one step for all nodes",
        BATCH,
        '--nodes="$PLAN_NNODES" --ntasks="$PLAN_NNODES"',
        '--nodes=1 --ntasks="$PLAN_NNODES"',
        STEP,
        T3 + "test_one_step_of_one_task_per_node",
    ),
    row(
        "one step only",
        BATCH,
        "    coproc LLMHUB_CO {\n",
        "    srun --nodes=1 --ntasks=1 true\n    coproc LLMHUB_CO {\n",
        T3 + "test_one_step_of_one_task_per_node",
    ),
    row(
        "kill-on-bad-exit",
        BATCH,
        "--kill-on-bad-exit=1 ",
        "",
        STEP,
        T3 + "test_one_step_of_one_task_per_node",
    ),
    row("one task per node", BATCH, " --ntasks-per-node=1", "", STEP),
    row("the CPUs of the step", BATCH, '"${cpus[@]}" ', "", STEP),
    row(
        "the rank script in the job directory",
        BATCH,
        "local script=$LLMHUB_ATTEMPT_DIR/rank.sh",
        "local script=$PLAN_WORK_DIR/rank.sh",
        STEP,
        T3 + "test_one_step_of_one_task_per_node",
    ),
    row("mp", RANK, "        --distributed-executor-backend mp\n", "", ENGINE),
    row(
        "no Ray",
        RANK,
        "--distributed-executor-backend mp",
        "--distributed-executor-backend ray",
        ENGINE,
        T3 + "test_no_ray",
    ),
    row("headless", RANK, "serve+=(--headless)", ":", f"{ENGINE}[1]"),
    row(
        "the number of nodes",
        RANK,
        '--nnodes "$PLAN_NNODES" ',
        "",
        ENGINE,
    ),
    row("the rank", RANK, '--node-rank "$RANK"', "--node-rank 0", f"{ENGINE}[1]"),
    row("the master", RANK, '--master-addr "$LLMHUB_MASTER_ADDR" ', "", ENGINE),
    row("the master port", RANK, '--master-port "$LLMHUB_MASTER_PORT"', "", ENGINE),
    row("env -u FI_LOG_LEVEL", RANK, " env -u FI_LOG_LEVEL", "", ENGINE),
    row(
        "the deployment env",
        RANK,
        '*) export_to_container "$name" "$REPLY" ;;',
        "*) ;;",
        T3 + "test_the_deployment_env_of_each_rank",
    ),
    row(
        "the deployment env on rank 1",
        RANK,
        '*) export_to_container "$name" "$REPLY" ;;',
        '*) [ "$RANK" -ne 0 ] || export_to_container "$name" "$REPLY" ;;',
        T3 + "test_the_deployment_env_of_each_rank[1]",
    ),
    row(
        "NCCL's debug file",
        RANK,
        '        export_to_container NCCL_DEBUG_FILE "$directory/%h.%p"\n',
        "",
        T3 + "test_nccl_debug_goes_to_files",
        T4 + "test_nccl_debug[nothing-set]",
    ),
    row(
        "the mode of the batch script",
        LAUNCHER,
        "        return Path(path)\n",
        "        Path(path).chmod(0o644)\n        return Path(path)\n",
        T3 + "test_the_written_script",
        PLAN + "test_a_launch",
    ),
    row(
        "ranks' own variables left out",
        "plan.py",
        "env=tuple((k, v) for k, v in env.items() if k not in RANK_ENV),",
        "env=tuple(env.items()),",
        PLAN + "test_env_reaches_the_plan_exactly",
    ),
    # ------------------------------------------------------------ T4
    row(
        "interfaces by their whole name",
        COMMON,
        "!= prefix || number !~ /^[0-9]+$/) next",
        "!= prefix) next",
        T4 + "test_fabric[vlan-child-first]",
        T4 + "test_refused_before_the_barrier[only-vlan-child]",
    ),
    row(
        "link-local addresses",
        COMMON,
        r"address ~ /^(127|169\.254)\./ || ",
        "",
        T4 + "test_refused_before_the_barrier[only-link-local]",
    ),
    row(
        "an exact NCCL interface list",
        RANK,
        "${PLAN_NCCL_SOCKET_IFNAME:-=$FABRIC_NAMES}",
        "${PLAN_NCCL_SOCKET_IFNAME:-$FABRIC_NAMES}",
        T4 + "test_fabric[by-number]",
    ),
    row(
        "the GPU check",
        RANK,
        "trap forward_signal TERM INT HUP\ncheck_gpus\n",
        "trap forward_signal TERM INT HUP\n",
        T4 + "test_refused_before_the_barrier[few-gpus]",
    ),
    row(
        "a failed step for an engine that ends with 0",
        RANK,
        "        STATUS=$((STOPPING ? 143 : 1))\n",
        "        :\n",
        T4 + "test_status[zero]",
    ),
    row(
        "a level that is set",
        RANK,
        "    if named_for_container NCCL_DEBUG; then\n",
        "    if false; then\n",
        T4 + "test_nccl_debug[level-of-job]",
        T4 + "test_nccl_debug[level-of-apptainer]",
    ),
    row(
        "variables of an outer job",
        BATCH,
        "    llmhub_forget_outer_job\n",
        "",
        OUTER_JOB,
    ),
    # ------------------------------------------------------------ T5
    row(
        "a member in the list",
        SEAM,
        '    Member(_CLIENT_VARS, "MODEL_READY_SIGNATURE"),\n',
        "",
        T5 + "test_everything_used_is_listed[launcher]",
    ),
    row(
        "a renamed member",
        SEAM,
        '    _method(_UTILS, "run_bash_command", "command"),\n',
        '    _method(_UTILS, "run_command", "command"),\n',
        T5 + "test_the_list_is_in_force",
        T5 + "test_a_member_exists",
    ),
    row(
        "the mark of an overridden member",
        SEAM,
        '_method(_HELPER, "ModelLauncher.launch", overridden=True),',
        '_method(_HELPER, "ModelLauncher.launch"),',
        T5 + "test_what_is_overridden_is_marked_so",
    ),
    # ------------------------------------------------------------ quoting
    row(
        "quotes around a value",
        RENDER,
        'return f"{name}={shlex.quote(str(value))}"',
        'return f"{name}={value}"',
        PLAN + "test_assignments_are_data[a b]",
        PLAN + "test_assignments_are_data[$(id)]",
    ),
    row(
        "quotes around the values of an array",
        RENDER,
        "{' '.join(shlex.quote(str(value)) for value in values)}",
        "{' '.join(str(value) for value in values)}",
        PLAN + "test_assignments_are_data[a b]",
        PLAN + "test_assignments_are_data_whatever_they_hold",
    ),
    row(
        "quotes around a value for sbatch",
        RENDER,
        "    if _PLAIN_SBATCH_VALUE.fullmatch(value):\n        return value\n"
        "    return ",
        "    return value or ",
        PLAN + 'test_sbatch_values[a b-"a b"]',
    ),
    row(
        "line breaks",
        "plan.py",
        'if len((value + ".").splitlines()) > 1 or "\\0" in value:',
        "if False:",
        PLAN + "test_refusal_of_a_line_break[account-LF]",
        PLAN + "test_refusal_of_a_line_break[env-NUL]",
        PLAN + "test_refusal_of_a_line_break_at_the_end",
    ),
    # ------------------------------------------------------------ refusals
    row(
        "sizes that leave GPUs idle",
        "plan.py",
        "    _refuse_mismatch(plan)\n",
        "",
        PLAN + "test_refusal_of_idle_gpus",
        PLAN + "test_refusal_of_a_mismatch",
    ),
    row(
        "a typed size wins",
        "plan.py",
        '            return Axis(option, _size(option, typed[option]), "typed")\n',
        "            pass\n",
        PLAN + "test_sizes[typed tensor, more nodes]",
    ),
    row(
        "a catalog size holds only for its own allocation",
        "plan.py",
        "if option in args and not (moved and derived):",
        "if option in args:",
        PLAN + "test_catalog_sizes_of_another_allocation",
        PLAN + "test_sizes[more nodes]",
    ),
    row(
        "owned args",
        "plan.py",
        '    if option in OWNED_ARGS or option.replace("--no-", "--", 1) in OWNED_ARGS:\n',
        "    if False:\n",
        PLAN + "test_refusal_of_owned_args[--nnodes=2]",
        PLAN + "test_refusal_of_owned_args[-n 2]",
    ),
    row(
        "secrets on the command line",
        "plan.py",
        "    if option in SECRET_ARGS and value is not True:\n",
        "    if False:\n",
        PLAN + "test_refusal_of_owned_args[--api-key=secret]",
    ),
    row(
        "the container",
        "plan.py",
        "    _refuse_container(params, site)\n    for",
        "    for",
        PLAN + "test_refusal_without_the_container",
        PLAN + "test_refusal_of_another_container",
        T2 + "test_multi_node_vllm_outside_the_container_is_refused",
    ),
    row(
        "an engine that nothing serves",
        LAUNCHER,
        'if route["num_nodes"] > 1 and route["engine"] not in engines:',
        "if False:",
        PLAN + "test_refusal_of_an_engine_that_nothing_serves",
    ),
    row(
        "the names of bad knobs",
        "settings.py",
        "            raise SettingsError(_explain(err, found)) from None\n",
        "            raise\n",
        PLAN + "test_a_bad_knob_is_named",
    ),
    row(
        "the alias of a knob",
        "settings.py",
        "for prefix in (PREFIX, ALIAS_PREFIX):",
        "for prefix in (PREFIX,):",
        PLAN + "test_a_knob_is_read[LLMFLUX_-rdzv_port]",
    ),
    # ------------------------------------------------------------ submission
    row("a held job", SUBMIT, "sbatch --hold", "sbatch", PLAN + "test_a_launch"),
    row(
        "the release",
        LAUNCHER,
        "            _release(self.slurm_job_id)\n",
        "",
        PLAN + "test_a_launch",
    ),
    row(
        "the end of a job that was not released",
        LAUNCHER,
        "            self._undo()\n",
        "",
        PLAN + "test_release_fails",
        PLAN + "test_sbatch_refuses",
    ),
    row(
        "sbatch's id among other words",
        SUBMIT,
        "sed -n -E 's/.*Submitted batch job ([0-9]+).*/\\1/p' | tail -n 1",
        "tail -n 1 | sed 's/.* //'",
        PLAN + "test_a_queued_job_is_not_lost[cluster name]",
    ),
    row(
        "the mode of the job's JSON",
        SUBMIT,
        '(umask 077 && set -C && : >"$json")\n',
        "",
        PLAN + "test_a_launch",
    ),
    row(
        "an outer job's variables at submission",
        SUBMIT,
        '        *) unset "$name" ;;\n',
        "        *) ;;\n",
        PLAN + "test_an_outer_job_is_not_passed_on",
    ),
    # ------------------------------------------------------------ status
    row(
        "the cause of a failure",
        LAUNCHER,
        "            status.failed_reason = cause\n",
        "",
        PLAN + "test_status[failed]",
    ),
    row(
        "a requeued job's state",
        LAUNCHER,
        "if cause and not waiting and status.server_status not in _HEALTHY:",
        "if cause:",
        PLAN + "test_status[requeued]",
    ),
    # ------------------------------------------------------------ T4, the rank
    row(
        "an interface's whole name",
        COMMON,
        "number !~ /^[0-9]+$/",
        "number !~ /^[0-9]/",
        T4 + "test_fabric[vlan-child-first]",
        T4 + "test_refused_before_the_barrier[only-vlan-child]",
        T4 + "test_no_fabric_on_the_head[run]",
    ),
    row(
        "loopback addresses",
        COMMON,
        "^(127|169\\.254)\\.",
        "^169\\.254\\.",
        T4 + "test_fabric[loopback-address]",
    ),
    row(
        "interfaces by number",
        COMMON,
        "sort -n -k 1,1",
        "sort -k 1,1",
        T4 + "test_fabric[by-number]",
    ),
    row(
        "second address of an interface",
        COMMON,
        " || seen[name]++",
        "",
        T4 + "test_fabric[second-address]",
    ),
    row(
        "gpus before the marker",
        RANK,
        "\ncheck_gpus\nfind_fabric\nmark_started\n",
        "\nfind_fabric\nmark_started\ncheck_gpus\n",
        T4 + "test_refused_before_the_barrier[few-gpus]",
        T4 + "test_refused_before_the_barrier[no-gpus]",
    ),
    row(
        "rank 0 holds the master address",
        RANK,
        'if [ "$RANK" -eq 0 ] && [ "$FABRIC_ADDRESS" != "$LLMHUB_MASTER_ADDR" ]; then',
        "if false; then",
        T4 + "test_refused_before_the_barrier[not-the-master]",
    ),
    row(
        "the barrier's word",
        RANK,
        ' || [ "$word" != go ]',
        "",
        T4 + "test_barrier_takes_one_word_only[wrong-word]",
    ),
    row(
        "the barrier",
        RANK,
        "mark_started\nawait_all_ranks\n",
        "mark_started\n",
        T4 + "test_barrier_waits_and_then_gives_up[run]",
        T4 + "test_barrier_takes_one_word_only[end-of-file]",
        T4 + "test_barrier_timeout[run]",
    ),
    row(
        "symmetric memory off",
        RANK,
        'export_to_container VLLM_ALLREDUCE_USE_SYMM_MEM "$PLAN_SYMM_MEM"',
        ":",
        T4 + "test_container_env[symm-mem]",
        T4 + "test_container_env[symm-mem-knob]",
    ),
    row(
        "exact form for NCCL",
        RANK,
        '"${PLAN_NCCL_SOCKET_IFNAME:-=$FABRIC_NAMES}"',
        '"${PLAN_NCCL_SOCKET_IFNAME:-$FABRIC_NAMES}"',
        T4 + "test_fabric[vlan-child-first]",
    ),
    row(
        "variables of the host's containers",
        RANK,
        'unset "APPTAINERENV_$name" "SINGULARITYENV_$name"',
        ":",
        T4 + "test_rank_sets_its_own_variables[apptainer]",
        T4 + "test_rank_sets_its_own_variables[singularity]",
    ),
    row(
        "NCCL's directory in the container",
        RANK,
        '        add_bind "$directory"\n',
        "",
        T4 + "test_nccl_debug[nothing-set]",
    ),
    row(
        "no subsystems with another's level",
        RANK,
        '        if named_for_container NCCL_DEBUG_SUBSYS; then\n            export_to_container NCCL_DEBUG_SUBSYS "$REPLY"\n        fi\n',
        "        export_to_container NCCL_DEBUG_SUBSYS INIT,NET\n",
        T4 + "test_nccl_debug[level-of-job]",
        T4 + "test_nccl_debug[level-of-host]",
    ),
    row(
        "what a cache's symlink points at",
        RANK,
        'resolved=$(realpath -m -- "$2")',
        "resolved=$2",
        T4 + "test_cache_behind_a_symlink[run]",
    ),
    row(
        "the Triton cache",
        RANK,
        'export_to_container TRITON_CACHE_DIR "$LLMHUB_CACHE_DIR/rank-$RANK/triton"',
        ":",
        T4 + "test_triton_cache_is_the_ranks_own[run]",
    ),
    row(
        "the engine's umask",
        RANK,
        'umask "$LLMHUB_UMASK"',
        ":",
        T4 + "test_files_are_the_owners[run]",
    ),
    row(
        "the rank's umask",
        RANK,
        "umask 077",
        ":",
        T4 + "test_files_are_the_owners[run]",
    ),
    row(
        "a rank's stderr in its own file",
        RANK,
        'exec 2>>"$log.err" </dev/null',
        "exec </dev/null",
        T4 + "test_logs[run]",
        T4 + "test_benign_lines_before_ready[run]",
    ),
    # ------------------------------------------------------------ T4, the batch script
    row(
        "the lock on the port",
        BATCH,
        'flock -n "$LLMHUB_LOCK" && return 0',
        "return 0",
        T4 + "test_two_jobs_on_a_node[run]",
    ),
    row(
        "ephemeral ports",
        BATCH,
        '        if [ "$port" -ge "$low" ] && [ "$port" -le "$high" ]; then continue; fi\n',
        "",
        T4 + "test_ephemeral_ports_only[run]",
        T4 + "test_ephemeral_ports_skipped[run]",
    ),
    row(
        "ports in use",
        BATCH,
        'case $used in *" $port "*) continue ;; esac',
        ":",
        T4 + "test_port_in_use[all-but-0]",
        T4 + "test_port_in_use[all-but-8]",
    ),
    row(
        "a missing ss is said",
        BATCH,
        'llmhub_say "WARN: ss not found on $LLMHUB_HEAD_NODE; cannot tell which ports are in use"',
        ":",
        T4 + "test_ss_missing[run]",
    ),
    row(
        "an attempt's own port",
        BATCH,
        "(SLURM_JOB_ID + LLMHUB_ATTEMPT + i)",
        "(SLURM_JOB_ID + i)",
        T4 + "test_attempts_have_ports_of_their_own[run]",
    ),
    row(
        "the tail hidden from vec-inf",
        BATCH,
        "LLMHUB-TAIL (userwarning): ",
        "LLMHUB-TAIL: ",
        T4 + "test_reason_of_a_crash[run]",
    ),
    row(
        "the clamp",
        BATCH,
        '[ "$LLMHUB_BUDGET" -gt $((left * 9 / 10)) ]',
        "false",
        T4 + "test_budget_within_the_walltime[hours]",
        T4 + "test_budget_within_slurms_end_time[run]",
    ),
    row(
        "days of a walltime",
        BATCH,
        "$((10#$days * 86400 + seconds))",
        "$((seconds))",
        T4 + "test_budget_within_the_walltime[days]",
    ),
    row(
        "the readiness budget",
        BATCH,
        'if [ "$PLAN_SERVER_TIMEOUT" -gt 0 ] && [ "$SECONDS" -ge "$LLMHUB_BUDGET" ]; then',
        "if false; then",
        T4 + "test_readiness_budget[run]",
    ),
    row(
        "an answer of 5xx is none",
        BATCH,
        'it is alive" ;;\n        *) return 1 ;;',
        'it is alive" ;;\n        *) return 0 ;;',
        T4 + "test_server_that_does_not_complete[500]",
        T4 + "test_server_that_does_not_complete[503]",
    ),
    row(
        "a completion before ready",
        BATCH,
        "completion/LLM | completion/VLM) ;;",
        "completion/none) ;;",
        T4 + "test_server_that_does_not_complete[none]",
        T4 + "test_readiness_request[run]",
    ),
    row(
        "health before a completion",
        BATCH,
        '    [ "$(llmhub_http 5 status GET /health)" = 200 ] || return 1\n',
        "",
        T4 + "test_unhealthy_then_ready[run]",
    ),
    row(
        "the API key",
        BATCH,
        "\"${key:+Authorization: Bearer $key$'\\r\\n'}\"",
        "''",
        T4 + "test_secrets[run]",
        T4 + "test_key_by_reference[run]",
    ),
    row(
        "the owner's files only",
        BATCH,
        "    umask 077\n    exec 3>&1",
        "    exec 3>&1",
        T4 + "test_secrets[run]",
    ),
    row(
        "the ready line",
        BATCH,
        "printf '%s\\n' \"$PLAN_READY_SIGNATURE\" >&4",
        ":",
        T4 + "test_topology_and_ready[run]",
    ),
    row(
        "the time of readiness",
        BATCH,
        "llmhub_mark ready",
        ":",
        T4 + "test_timeline[run]",
    ),
    row(
        "logs of the first attempt",
        BATCH,
        'mv -- "$LLMHUB_JOB_DIR/ranks" "$LLMHUB_JOB_DIR/ranks.before-attempt-$number"',
        'rm -r -- "$LLMHUB_JOB_DIR/ranks"',
        T4 + "test_requeued[run]",
    ),
    row(
        "a stale failure.json",
        BATCH,
        'rm -f -- "$LLMHUB_JOB_DIR/failure.json"',
        ":",
        T4 + "test_requeued[run]",
    ),
    row(
        "what is known of a late rank",
        BATCH,
        'llmhub_diagnose_start "${!up[@]}"',
        ":",
        T4 + "test_barrier_timeout[run]",
    ),
    row(
        "failure.json",
        BATCH,
        '    llmhub_write_failure "$@"\n',
        "",
        T4 + "test_failure_file[run]",
        T4 + "test_rank_ends_with_0_while_serving[run]",
    ),
    row(
        "the error line",
        BATCH,
        "    printf 'LLMHUB-ERROR: %s\\n' \"$1\" >&4\n",
        "",
        T4 + "test_reason_of_a_crash[run]",
        T4 + "test_barrier_timeout[run]",
        T4 + "test_no_fabric_on_the_head[run]",
    ),
    row(
        "the end of the step after a failure",
        BATCH,
        '    llmhub_write_failure "$@"\n    llmhub_end_step\n',
        '    llmhub_write_failure "$@"\n',
        T4 + "test_readiness_budget[run]",
    ),
    row(
        "the stall watch",
        BATCH,
        'if [ "$PLAN_STALL_TIMEOUT" -gt 0 ] && [ $((SECONDS - LLMHUB_ALIVE_AT))',
        "if false && [ $((SECONDS - LLMHUB_ALIVE_AT))",
        T4 + "test_stalled[run]",
    ),
    row(
        "an idle server does not stall",
        BATCH,
        " || [ $((requests + connections)) -eq 0 ]; }; then",
        "; }; then",
        T4 + "test_not_stalled[idle]",
    ),
    row(
        "the idle probe",
        BATCH,
        'if [ "$PLAN_IDLE_PROBE" -gt 0 ] && [ $((SECONDS',
        "if false && [ $((SECONDS",
        T4 + "test_idle_probe[run]",
        T4 + "test_idle_probe_without_answer[run]",
    ),
    row(
        "restarts",
        BATCH,
        '[ "$LLMHUB_READY" -eq 1 ] && [ "$LLMHUB_RESTARTS" -lt "$PLAN_MAX_RESTARTS" ]',
        "false",
        T4 + "test_restart[run]",
    ),
    # ------------------------------------------------------------ quoting
    row(
        "quotes around an array's values",
        RENDER,
        "' '.join(shlex.quote(str(value)) for value in values)",
        "' '.join(repr(str(value)) for value in values)",
        QUOTING + "test_odd_values[C.UTF-8]",
        QUOTING + "test_any_values",
    ),
    row(
        "a backslash for Apptainer",
        RANK,
        "    value=${value//\\\\/\\\\\\\\}\n",
        "",
        QUOTING + "test_odd_values[C.UTF-8]",
    ),
    row(
        "a dollar for Apptainer",
        RANK,
        "    value=${value//\\$/\\\\\\$}\n",
        "",
        QUOTING + "test_odd_values[C.UTF-8]",
    ),
    row(
        "a backquote for Apptainer",
        RANK,
        "    value=${value//\\`/\\\\\\`}\n",
        "",
        QUOTING + "test_odd_values[C.UTF-8]",
        T4 + "test_container_env[value-of-reference-is-data]",
    ),
    row(
        "values with a leading dash",
        PLAN_PY,
        'if text.startswith("-") and not',
        "if False and not",
        QUOTING + "test_odd_values[C.UTF-8]",
    ),
    row(
        "quotes in a directive",
        RENDER,
        "return '\"' + re.sub(r'([\"\\\\#])', r\"\\\\\\1\", value) + '\"'",
        "return value",
        QUOTING + "test_sbatch_value",
        QUOTING + "test_directives_of_the_script",
    ),
    row(
        "a comment in a directive",
        RENDER,
        "r'([\"\\\\#])'",
        "r'([\"\\\\])'",
        QUOTING + "test_sbatch_value",
    ),
    row(
        "quotes around vec-inf's directory",
        RENDER,
        "'\"${PLAN_SRC_DIR}\"'",
        '"${PLAN_SRC_DIR}"',
        T4 + "test_paths_are_data[run]",
    ),
    # ------------------------------------------------------------ ways round
    row(
        "short options by their whole name",
        PLAN_PY,
        'option.partition(".")[0] not in SHORT_OPTIONS',
        "False",
        PLAN + "test_refusal_of_a_way_round",
    ),
    row(
        "a model that is no option",
        PLAN_PY,
        '[0] == "-":',
        '[0] == "?":',
        PLAN + "test_refusal_of_a_way_round",
    ),
    row(
        "sizes last on the command line",
        LAUNCHER,
        '            params["engine_args"].pop(option, None)\n',
        "",
        PLAN + "test_sizes_come_last",
    ),
    row(
        "options of rank 0",
        PLAN_PY,
        "if k not in HEAD_ARGS",
        "if True",
        PLAN + "test_api_servers_are_rank_0s",
    ),
    # ------------------------------------------------------------ the wait
    row(
        "the time of a queued job, which does not count",
        LAUNCHER,
        "            if progress.stage == watch.QUEUED:\n                deadline = None\n"
        "            elif deadline is None:",
        "            if deadline is None:",
        WATCHED + "test_a_queued_job_does_not_time_out",
        WATCHED + "test_a_requeued_job_gets_its_time_again",
    ),
    row(
        "the end of a wait with the job's",
        LAUNCHER,
        "            if progress.stage == watch.STOPPED:\n                raise _ServerError(",
        "            if progress.stage == watch.STOPPED:\n                repr(",
        WATCHED + "test_a_queued_job_does_not_time_out",
    ),
    row(
        "the patience with Slurm's controller",
        LAUNCHER,
        "hopeless = slurm.no_such_job(str(err)) or not slurm.is_installed()",
        "hopeless = True",
        WATCHED + "test_a_wait_outlives_a_controller_that_restarts",
    ),
    row(
        "the end of a wait for a job that Slurm has forgotten",
        LAUNCHER,
        "hopeless = slurm.no_such_job(str(err)) or not slurm.is_installed()",
        "hopeless = not slurm.is_installed()",
        WATCHED + "test_a_wait_ends_when_slurm_forgets_the_job",
    ),
    row(
        "a health check that is not answered, which is no failure",
        WATCH,
        'if status.server_status == "FAILED" and not silent:',
        'if status.server_status == "FAILED":',
        WATCHED + "test_a_server_that_is_silent_for_a_moment_is_not_given_up",
        SERVED + "test_a_moment_without_an_answer_stops_nothing",
    ),
    row(
        "a failure that a job has recorded",
        WATCH,
        "        and job_dir.failure() is None\n",
        "",
        WATCHED + "test_a_failure_counts_all_the_same",
    ),
    row(
        "the escape sequences of a log",
        WATCH,
        '_ESCAPE.sub("", text)',
        "text",
        WATCHED + "test_no_control_character_of_a_log_is_told",
    ),
    row(
        "the control characters of a log",
        WATCH,
        "for char in text if char.isprintable()",
        "for char in text",
        WATCHED + "test_no_control_character_of_a_log_is_told",
    ),
    row(
        "an end that is not known yet",
        WATCH,
        'if state == "COMPLETING":',
        'if state == "":',
        WATCHED + "test_a_job_that_is_ending_is_not_judged_yet",
    ),
    row(
        "Slurm's silence, which is no end",
        SLURM,
        "return True if no_such_job(shown.stderr) else None",
        "return True",
        WATCHED + "test_a_job_is_asked_for",
    ),
    # ------------------------------------------------------------ what would be submitted
    row(
        "the directory that a preview does not make",
        LAUNCHER,
        'names = {**function.__globals__, "Path": _NoDirectory}',
        "names = function.__globals__",
        SHOWN + "test_the_log_directory_is_not_made",
        SHOWN + "test_nothing_is_written_and_no_slurm_is_needed",
    ),
    row(
        "the mask over env",
        PREVIEW,
        'hidden["env"] = {name: MASK for name in params.get("env") or {}}',
        'hidden["env"] = dict(params.get("env") or {})',
        SHOWN + "test_no_secret_is_shown_unless_asked_for",
        LAUNCHED + "test_json_is_vec_infs_config_without_values_of_env",
    ),
    row(
        "the mask over engine args",
        PREVIEW,
        "return pattern.sub(MASK, text) if pattern.search(text) else value",
        "return value",
        SHOWN + "test_no_secret_is_shown_unless_asked_for",
    ),
    row(
        "the mask over binds",
        PREVIEW,
        "MASK if b in values else b for b in binds",
        "b for b in binds",
        SHOWN + "test_a_masked_request_is_changed_in_a_copy[short]",
    ),
    row(
        "the mask that leaves words of the script alone",
        PREVIEW,
        "_TELLING = 8",
        "_TELLING = 1",
        SHOWN + "test_a_short_value_is_masked_in_its_own_place_only",
    ),
    # ------------------------------------------------------------ at the shell
    row(
        "the config without values of env",
        CLI_LAUNCH,
        "document = masked(response.config)",
        "document = dict(response.config)",
        LAUNCHED + "test_json_is_vec_infs_config_without_values_of_env",
    ),
    row(
        "the job of an interrupted submission",
        CLI_LAUNCH,
        "problem = cancel(client, job_id)",
        'problem = ""',
        LAUNCHED + "test_interrupted_while_it_is_submitted_nothing_is_left",
    ),
    row(
        "an sbatch that is not cut short",
        CLI_SIGNALS,
        "signal.signal(number, signal.SIG_IGN) for number in STOPPING",
        "signal.getsignal(number) for number in STOPPING",
        LAUNCHED + "test_interrupted_while_it_is_submitted_nothing_is_left",
    ),
    row(
        "a submission that is not interrupted",
        CLI_SIGNALS,
        "signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, [])",
        LAUNCHED + "test_interrupted_while_it_is_submitted_nothing_is_left",
    ),
    row(
        "the lost connection",
        CLI_SIGNALS,
        "STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)",
        "STOPPING = (signal.SIGINT, signal.SIGTERM)",
        SERVED + "test_an_interruption_stops_the_job",
    ),
    row(
        "the first Ctrl-C, which the second does not undo",
        CLI_SIGNALS,
        "        signal.signal(other, signal.SIG_IGN)\n    raise",
        "        del other\n    raise",
        SERVED + "test_one_interruption_is_enough",
    ),
    row(
        "what is ignored, by nohup for instance",
        CLI_SIGNALS,
        "        if handler is not signal.SIG_IGN:\n    ",
        "    ",
        SERVED + "test_what_is_ignored_stays_so",
    ),
    row(
        "the stop of an interrupted serve",
        CLI_SERVE,
        "            stop(client, job_id)\n            raise CommandError(",
        "            raise CommandError(",
        SERVED + "test_an_interruption_stops_the_job",
    ),
    row(
        "the job that is kept",
        CLI_SERVE,
        "            if keep:\n                raise goes_on",
        "            if False:\n                raise goes_on",
        SERVED + "test_keep_leaves_the_job",
    ),
    row(
        "the stop of a serve that fails",
        CLI_SERVE,
        "if not keep and not slurm.is_over(job_id):",
        "if False:",
        SERVED + "test_an_error_of_its_own_stops_the_job",
        SERVED + "test_a_job_that_vec_inf_alone_calls_failed_is_stopped",
    ),
    row(
        "the wait for the end of the job",
        CLI_SERVE,
        "while not slurm.is_over(job_id):",
        "while False:",
        SERVED + "test_it_waits_until_slurm_says_that_the_job_is_gone",
    ),
    row(
        "a cancellation that is tried again",
        CLI_SERVE,
        "if problem or time.monotonic() - asked > STOP_AGAIN:",
        "if False:",
        SERVED + "test_a_cancellation_that_fails_is_tried_again",
    ),
    row(
        "the job id, which a shell would read",
        CLI_COMMON,
        "if not _JOB_ID.fullmatch(str(value)):",
        "if False:",
        CONNECTED + "test_what_is_no_job_id_is_2_and_reaches_no_shell",
    ),
    row(
        "the quotes of the env lines",
        CLI_CONNECT,
        "export {k}={shlex.quote(v)}",
        "export {k}={v}",
        CONNECTED + "test_the_env_lines_survive_eval[two words]",
        CONNECTED + "test_the_env_lines_survive_eval[a;b&c|d>e<f]",
    ),
    row(
        "the key, which is shown only when asked for",
        CLI_CONNECT,
        "        if show_secrets:\n            rows",
        "        if True:\n            rows",
        CONNECTED + "test_a_key_is_shown_only_when_asked_for",
        SERVED + "test_it_says_how_to_reach_the_model_and_how_busy_it_is",
    ),
    row(
        "the markup of a log, which is text",
        CLI_STAGES,
        "self.console.print(Text(clean_text(text), style=style), soft_wrap=True)",
        "self.console.print(text, style=style, soft_wrap=True)",
        LAUNCHED + "test_markup_of_a_log_is_text",
    ),
]
