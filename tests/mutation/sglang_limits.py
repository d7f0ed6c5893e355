"""Seeded defects of what the adapter for SGLang refuses or leaves out, and of compressed entries."""

from __future__ import annotations

from tests.mutation.mutant import mutants

_TESTS = "tests/engines/sglang/"
_LIMITS, _LEFT_OUT, _ENTRIES = (f"{_TESTS}test_{name}.py::" for name in ("limits", "left_out", "entry_steps"))
_OWN_KEYS = _LIMITS + "test_settings_that_are_not_covered_with_keys_of_their_own_are_named"
_DRAFTS = _LIMITS + "test_drafts_that_are_not_covered_are_named"
_SEVERAL = _LIMITS + "test_several_draft_models_are_covered_by_themselves"
_OF_SEVERAL = _LIMITS + "test_pools_of_several_draft_models_that_are_not_covered_are_named"
_PAIRS = _LIMITS + "test_both_roles_of_separated_servers_pass"
_BESIDE_STATES = _LIMITS + "test_what_is_not_covered_beside_states_is_named"
_WINDOWS = _LIMITS + "test_parts_of_a_window_pool_that_are_not_covered_are_named"
_SUB_POOLS = _LEFT_OUT + "test_layouts_of_sub_pools_that_are_not_covered_are_named"

LIMITS = mutants(
    "canary_obs/engines/sglang/limits.py",
    (
        "if (value := getattr(arguments, name, covered[0])) not in covered:",
        "if (value := getattr(arguments, name, covered[0])) is covered:",
        _LIMITS + "test_every_setting_that_is_not_covered_is_named",
    ),
    (
        "        if getattr(model, name):",
        "        if False:",
        _LIMITS + "test_models_that_are_not_covered_are_named",
    ),
    ("if not scheduler.is_generation:", "if False:", _LIMITS + "test_models_that_do_not_generate_are_named"),
    (
        "if (name := type(thing).__name__) not in classes[what]:",
        "if (name := type(thing).__name__) is classes:",
        _LIMITS + "test_memory_of_an_unknown_class_is_named",
    ),
    ("        _check_windows(runner)\n", "        pass\n", _WINDOWS),
    ("if (name := type(part).__name__) not in pools:", 'if (name := "") != "":', _WINDOWS),
    ("if (name := type(part).__name__) not in allocators:", 'if (name := "") != "":', _WINDOWS),
    ('    if getattr(allocator, "swa_req_ring", False):', "    if False:", _WINDOWS),
    ('        _check_alone("index keys", arguments, _WITH_OWN_KEYS)\n', "        pass\n", _OWN_KEYS),
    ('        _check_alone("DeepSeek-V4", arguments, _WITH_OWN_KEYS)\n', "        pass\n", _OWN_KEYS),
    (
        '        _check_alone("unified memory", arguments, _WITH_UNIFIED_MEMORY)\n',
        "        pass\n",
        _LIMITS + "test_what_is_not_covered_in_unified_memory_is_named",
    ),
    ('        _check_drafts(scheduler, on_gpu=device != "cpu")\n', "        pass\n", _DRAFTS),
    ("    if len(runners) > 1:", "    if False:", _DRAFTS),
    ('        _check_alone("several draft models", arguments, _WITH_SEVERAL)\n', "        pass\n", _SEVERAL),
    ("        if pool.full_layer_nums:", "        if False:", _OF_SEVERAL),
    ("        if pool.full_to_swa_index_mapping is not mapping:", "        if False:", _OF_SEVERAL),
    (
        "        if runner.sliding_window_size != target.sliding_window_size:",
        "        if False:",
        _OF_SEVERAL,
    ),
    (
        'if (name := type(part).__name__) != (known := _CLASSES["KV pool"][0]):',
        'if (name := "") != (known := ""):',
        _OF_SEVERAL,
    ),
    (
        "if has_states(scheduler.tp_worker.model_runner.token_to_kv_pool):",
        "if False:",
        _BESIDE_STATES,
    ),
    (
        'not in (known := _CLASSES["KV pool"][:2]):',
        'not in (known := _CLASSES["KV pool"]):',
        _DRAFTS,
    ),
    (
        'if role == "decode" and arguments.enable_hierarchical_cache and storage is not None:',
        "if False:",
        _PAIRS,
    ),
    (
        'if role == "decode" and arguments.enable_hierarchical_cache and storage is not None:',
        "if arguments.enable_hierarchical_cache and storage is not None:",
        _PAIRS,
    ),
    (
        '            raise _refused(what, "states that go',
        '            print(what, "states that go',
        _LIMITS + "test_what_separated_servers_on_gpus_are_covered_with",
    ),
    (
        'on GPUs", arguments, _WITH_ROLES_ON_GPUS)',
        'on GPUs", arguments, {})',
        _LIMITS + "test_what_separated_servers_on_gpus_are_covered_with",
    ),
    (
        '        if arguments.enable_hierarchical_cache:\n            raise _refused("states in',
        '        if False:\n            raise _refused("states in',
        _BESIDE_STATES,
    ),
    (
        "arguments.speculative_algorithm not in _SENT or drafts_trees(arguments)",
        "arguments.speculative_algorithm not in _SENT",
        _LIMITS + "test_drafts_that_go_to_another_server_are_chains_of_eagle",
    ),
    (
        "if not copied_to_host(",
        "if None is copied_to_host(",
        _LIMITS + "test_drafts_in_host_memory_are_copied_with_the_targets_full_layers",
    ),
    (
        "        if part not in known:",
        "        if False:",
        _LIMITS + "test_states_are_taken_with_the_pools_that_are_covered_beside_them",
    ),
)

LEFT_OUT = (
    *mutants(
        "canary_obs/engines/sglang/left_out.py",
        (
            "self.bytes / total if total",
            "total / self.bytes if total",
            _LEFT_OUT + "test_a_part_is_described_with_its_share_of_all_bytes",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/deepseek_v4.py",
        ("pool.request_window is not None or ", "", _SUB_POOLS),
        (" or pool.swa_req_ring_size is not None:", ":", _SUB_POOLS),
        ("    if pool.kv_pools[ratio] is None:", "    if False:", _SUB_POOLS),
        ("    if keys.use_fp4_indexer:", "    if False:", _SUB_POOLS),
        (
            'if (kind, layout) != ("DeepSeekV4SingleKVPool", "v4"):',
            'if kind != "DeepSeekV4SingleKVPool":',
            _LEFT_OUT + "test_rows_of_another_class_or_layout_are_named",
        ),
        (
            "        refused[UNIFIED] = ",
            "        refused[WINDOWS] = ",
            _LEFT_OUT + "test_windows_and_entries_in_one_pool_are_left_out_together",
        ),
        (
            "bytes=bytes_of(tensors), reason=",
            "bytes=len(tensors), reason=",
            _LEFT_OUT + "test_each_sub_pool_that_is_refused_is_left_out_with_its_bytes",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/groups.py",
        (
            "            refused[what] = _reason(error)\n",
            "            pass\n",
            _LEFT_OUT + "test_an_engine_whose_sub_pools_are_all_refused_keeps_the_group_of_its_table",
        ),
        (
            "left_out=(LeftOut(what=what, bytes=size, reason=reason),)",
            "left_out=()",
            _LEFT_OUT + "test_index_keys_that_are_not_covered_are_left_out_beside_their_latent_vectors",
        ),
    ),
    *mutants(
        "canary_obs/engines/sglang/index_keys.py",
        (
            "(count := int(pool.index_kpool)) != 1:",
            "(count := int(pool.index_kpool)) < 1:",
            _LEFT_OUT + "test_index_keys_that_are_not_covered_are_left_out_beside_their_latent_vectors",
        ),
    ),
)

ENTRY_STEPS = mutants(
    "canary_obs/engines/sglang/entry_steps.py",
    (
        "(entries + 1) * ratio - 1",
        "entries * ratio",
        _ENTRIES + "test_a_run_may_be_of_several_forwards_and_of_prompt_and_output",
    ),
    (
        "prefix - prefix % ratio, prefix)",
        "prefix, prefix)",
        _ENTRIES + "test_a_run_may_be_of_several_forwards_and_of_prompt_and_output",
    ),
    (
        "found += output[max(start - length, 0) : stop - length]",
        "pass",
        _ENTRIES + "test_a_run_may_be_of_several_forwards_and_of_prompt_and_output",
    ),
    (
        "            if start <= first[place]:",
        "            if True:",
        _ENTRIES + "test_a_request_that_was_taken_back_is_computed_anew",
    ),
    (
        "self._table[rows, ratio - 1 : ",
        "self._table[0, ratio - 1 : ",
        _ENTRIES + "test_a_run_may_be_of_several_forwards_and_of_prompt_and_output",
    ),
)

_UNIFIED, _PHYSICAL = (f"{_TESTS}test_{name}.py::test_" for name in ("unified_memory", "physical_slots"))
_LARGER = _PHYSICAL + "slots_of_larger_pages"
_LAST_SLOT = _PHYSICAL + "whether_another_part_reaches_the_last_full_slot"

UNIFIED_MEMORY = mutants(
    "canary_obs/engines/sglang/unified_memory.py",
    (
        "            give_up(self._observer, name, slots)\n",
        "            pass\n",
        _UNIFIED + "whole_pages_are_given_up_before_they_are_free",
    ),
    (
        " and allocator.free_group is None:",
        ":",
        _UNIFIED + "frees_that_wait_for_others_are_given_up_with_them",
    ),
    (
        "        self._observer.copied(name, left, _slots(destination, size))\n",
        "        pass\n",
        _UNIFIED + "a_move_is_a_copy_whose_source_is_given_up",
    ),
    (
        "        self._observer.invalidated(name, left)\n",
        "        pass\n",
        _UNIFIED + "a_move_is_a_copy_whose_source_is_given_up",
    ),
    (
        '            patches.wrap(freed.allocator, "clear", self._around_clear(name, freed))\n',
        "",
        _UNIFIED + "a_cleared_allocator_gives_up_all",
    ),
)
PHYSICAL_SLOTS = mutants(
    "canary_obs/engines/sglang/physical_slots.py",
    ('virtual.div(self._page_size, rounding_mode="floor")', "virtual", _LARGER),
    ("(numbers >= 0) & (numbers < table.numel())", "numbers < table.numel()", _LARGER),
    (
        "self._page_size + virtual % self._page_size, 0)",
        "self._page_size, 0)",
        _LARGER,
    ),
    (
        "> (page_size - 1) * full",
        "> page_size * full",
        _LAST_SLOT,
    ),
)

ALL = LIMITS + LEFT_OUT + ENTRY_STEPS + UNIFIED_MEMORY + PHYSICAL_SLOTS
