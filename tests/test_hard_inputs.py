"""Inputs that broke other attention and softmax libraries, and the tests that hold each kind here.

`KINDS` is the catalogue: a kind's number, what went wrong elsewhere, and where it is tested; a test that is renamed or removed leaves a
hole, which the check below finds. `LATER` are kinds of what this library does not do yet: a kind moves up together with its feature.
"""
import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

KINDS: dict[int, tuple[str, list[str]]] = {
    1: ("a mask with a row of False", [
        "attention/test_masks::test_a_row_that_may_see_nothing_is_zero_with_lse_minus_infinity",
        "attention/test_sdpa::test_a_row_that_may_attend_to_nothing_is_zero"]),
    2: ("the same as a float bias of −∞; a first key tile of −∞", [
        "attention/test_masks::test_a_row_that_may_see_nothing_is_zero_with_lse_minus_infinity",
        "attention/test_masks::test_a_first_key_tile_of_minus_infinity_rescales_to_nothing"]),
    4: ("NaN gradients of an empty row", ["attention/test_masks::test_what_comes_into_an_empty_row_backwards_never_matters"]),
    5: ("causal with more queries than keys", [
        "attention/test_masks::test_causal_with_more_queries_than_keys_leaves_the_leading_rows_empty",
        "gpu/test_inputs_gpu::test_a_thousand_rows_without_keys"]),
    7: ("lse of an empty row is +∞ or finite", [
        "attention/test_varlen::test_zero_length_members", "gpu/test_inputs_gpu::test_a_thousand_rows_without_keys"]),
    8: ("merging two empty states", ["attention/test_merge::test_small_merges_by_hand"]),
    10: ("NaN in a hidden key or value leaks", [
        "attention/test_masks::test_a_hidden_key_or_value_never_reaches_a_result",
        "gpu/test_hopper_gpu::test_what_lies_outside_is_never_read"]),
    11: ("memory beyond a sequence's length", ["attention/test_masks::test_slots_beyond_each_length_are_never_read_into_a_result"]),
    12: ("NaN in the inputs turned into zeros", [
        "attention/test_masks::test_what_is_not_finite_and_visible_stays_so",
        "gpu/test_hopper_gpu::test_nan_and_infinity_in_visible_inputs_reach_the_rows_that_see_them"]),
    14: ("a mask switches causality off", [
        "attention/test_masks::test_a_mask_and_causal_act_together",
        "attention/test_sdpa::test_causal_is_top_left_and_acts_with_the_mask"]),
    15: ("which corner causal is anchored to", [
        "attention/test_masks::test_causal_is_anchored_where_it_says",
        "attention/test_sdpa::test_causal_is_top_left_and_acts_with_the_mask"]),
    16: ("window end points", ["attention/test_masks::test_window_end_points_are_inclusive"]),
    17: ("a window as wide as the sequence", [
        "attention/test_masks::test_a_window_as_wide_as_the_sequence_is_plain_causal",
        "gpu/test_inputs_gpu::test_a_window_as_wide_as_the_sequence_is_plain_causal"]),
    19: ("scale multiplies the bias", ["attention/test_masks::test_scale_leaves_the_bias_alone"]),
    20: ("a gradient for the bias alone", [
        "attention/test_gradients::test_only_what_is_asked_for",
        "attention/test_gradients::test_rows_of_a_bias_gradient_sum_to_what_lse_brings"]),
    22: ("masks that broadcast, of odd ranks", [
        "attention/test_sdpa::test_masks_of_every_rank_broadcast",
        "attention/test_masks::test_biases_and_masks_broadcast_and_their_gradients_are_summed",
        "gpu/test_inputs_gpu::test_masks_and_biases_that_are_broadcast"]),
    23: ("a bias of another dtype than q", [
        "attention/test_masks::test_a_bias_of_another_dtype_keeps_its_own",
        "gpu/test_inputs_gpu::test_masks_and_biases_that_are_broadcast"]),
    25: ("softcap's formula and gradient", [
        "attention/test_masks::test_softcap_bounds_scores_before_the_bias_and_flattens_their_gradient",
        "gpu/test_inputs_gpu::test_softcap_at_length"]),
    26: ("no batch", [
        "attention/test_shapes::test_an_empty_dimension_gives_empty_or_zero_answers",
        "attention/test_ops::test_an_empty_batch_through_a_compiled_graph", "gpu/test_inputs_gpu::test_sizes_of_zero",
        "gpu/test_runtime_gpu::test_compiled_with_inductor_for_all_lengths_and_no_batch"]),
    28: ("head dim 0 of q and k, not of v", [
        "attention/test_shapes::test_head_dim_zero_of_q_and_k_averages_v", "gpu/test_inputs_gpu::test_sizes_of_zero"]),
    29: ("packed members of length zero", [
        "attention/test_varlen::test_zero_length_members", "attention/test_varlen::test_every_sequence_empty",
        "gpu/test_inputs_gpu::test_members_of_length_zero"]),
    31: ("packed tensors longer than their sequences", [
        "attention/test_varlen::test_tokens_after_the_last_offset_get_zeros",
        "gpu/test_inputs_gpu::test_tokens_that_belong_to_no_sequence"]),
    32: ("offsets that lie", [
        "attention/test_varlen::test_offsets_on_the_host_that_lie_are_refused",
        "attention/test_varlen::test_a_longest_length_that_is_too_short_is_refused",
        "attention/test_varlen::test_offsets_may_be_int64_and_lie_on_the_host",
        "gpu/test_inputs_gpu::test_offsets_on_the_card_that_lie_touch_nothing_outside"]),
    34: ("scores beyond fp16", [
        "attention/test_shapes::test_scores_beyond_the_range_of_fp16", "gpu/test_inputs_gpu::test_scores_of_a_million_in_fp16"]),
    35: ("a very negative lse overflows the backward", [
        "attention/test_shapes::test_a_very_negative_lse_overflows_nothing_in_the_backward",
        "gpu/test_inputs_gpu::test_a_very_negative_lse_under_an_all_true_mask", "gpu/test_inputs_gpu::test_a_very_negative_lse"]),
    37: ("scale 0 taken for none", [
        "attention/test_shapes::test_scale_is_what_was_given",
        "attention/test_shapes::test_no_scale_is_one_over_the_root_of_the_dim_of_q"]),
    38: ("fp32 quietly in tf32", [
        "attention/test_shapes::test_fp32_is_computed_in_fp32", "gpu/test_runtime_gpu::test_tf32_only_where_torch_allows_it"]),
    40: ("other head dims of v than of q", [
        "attention/test_shapes::test_head_dims_of_q_and_v_may_differ", "gpu/test_inputs_gpu::test_192_dims_of_q_and_128_of_v",
        "gpu/test_inputs_gpu::test_other_dims_of_q_and_v"]),
    43: ("partial results rounded between steps", ["attention/test_merge::test_the_error_does_not_grow_with_the_number_of_chunks"]),
    44: ("lse in base 2", ["attention/test_merge::test_split_is_whole", "attention/test_masks::test_causal_is_anchored_where_it_says"]),
    46: ("a gradient of stride 0", ["attention/test_strides::test_a_gradient_that_comes_in_expanded"]),
    47: ("a gradient transposed, or sliced from a concatenation", [
        "attention/test_strides::test_a_gradient_sliced_from_a_concatenation",
        "attention/test_strides::test_layouts_one_by_one_for_each_operand",
        "gpu/test_inputs_gpu::test_each_operand_in_an_order_of_its_own"]),
    49: ("expanded keys and values", [
        "attention/test_strides::test_expanded_keys_and_values", "gpu/test_inputs_gpu::test_expanded_heads_of_33_keys_under_a_mask"]),
    50: ("a last stride that is not 1", [
        "attention/test_strides::test_any_layout_gives_what_contiguous_memory_gives",
        "attention/test_strides::test_what_has_a_value_for_each_head_or_sequence_may_have_strides"]),
    52: ("addresses off 16 bytes", [
        "attention/test_strides::test_any_layout_gives_what_contiguous_memory_gives",
        "gpu/test_inputs_gpu::test_addresses_that_are_not_aligned",
        "gpu/test_inputs_gpu::test_lengths_that_are_no_multiple_of_16_bytes_where_tma_serves",
        "softmax/test_api::test_layouts_in_every_dimension"]),
    53: ("a head's last tile overwrites the next head", [
        "attention/test_shapes::test_lengths_around_a_block", "gpu/test_inputs_gpu::test_the_last_tile_of_a_head_and_its_neighbour"]),
    54: ("gradients of grouped heads", [
        "attention/test_shapes::test_query_head_h_reads_kv_head_h_over_group_and_gradients_are_summed",
        "gpu/test_inputs_gpu::test_the_last_tile_of_a_head_and_its_neighbour"]),
    56: ("more than 65 535 of an axis", [
        "attention/test_shapes::test_more_than_65535_batches", "gpu/test_sizes_gpu::test_more_than_65535_of_an_axis"]),
    58: ("strides beyond 32 bits", [
        "gpu/test_sizes_gpu::test_rows_of_a_wide_matrix", "gpu/test_sizes_gpu::test_batches_2_to_30_elements_apart",
        "gpu/test_sizes_gpu::test_two_million_queries", "gpu/test_sizes_gpu::test_packed_tensors_of_2_to_31_elements"]),
    59: ("masks of more than 2³¹ elements", [
        "gpu/test_sizes_gpu::test_a_mask_of_54_thousand_rows_and_columns",
        "gpu/test_sizes_gpu::test_masks_and_biases_of_more_than_2_to_31_elements"]),
    61: ("dropping before normalising", [
        "attention/test_dropout::test_the_sum_is_taken_before_dropping",
        "attention/test_dropout::test_an_empty_row_stays_zero_under_dropout"]),
    62: ("one seed, two masks", [
        "attention/test_dropout::test_the_mask_is_philox_at_key_row_and_head_in_both_passes",
        "attention/test_dropout::test_without_a_seed_torch_draws_it",
        "attention/test_dropout::test_keep_rate_and_independence_of_neighbours",
        "gpu/test_runtime_gpu::test_dropout_in_a_graph_draws_a_new_mask_each_time_and_the_same_in_both_passes"]),
    64: ("lse without a gradient", ["attention/test_gradients::test_lse_has_a_gradient"]),
    65: ("derivatives of derivatives", [
        "attention/test_gradients::test_second_derivatives_against_finite_differences",
        "attention/test_gradients::test_a_gradient_penalty_knows_empty_rows_and_every_backend"]),
    67: ("a first call that tunes and spoils its output", [
        "attention/test_random::test_gradients_repeat_when_asked", "gpu/test_runtime_gpu::test_thirty_runs_are_bitwise_equal"]),
    69: ("a backward that does not repeat", [
        "attention/test_random::test_gradients_repeat_when_asked", "gpu/test_runtime_gpu::test_thirty_runs_are_bitwise_equal"]),
    70: ("a race in the backward", ["gpu/test_runtime_gpu::test_fifty_backward_passes_on_one_graph"]),
    76: ("shape, order and dtype of lse", ["attention/test_varlen::test_shapes_and_dtype_of_lse"]),
    77: ("fakes with other strides than the real", [
        "attention/test_ops::test_fakes_have_the_shapes_strides_and_dtypes_of_the_real", "attention/test_ops::test_opcheck"]),
    79: ("lengths specialised under torch.compile", [
        "attention/test_ops::test_compiling_whole_with_dynamic_lengths_recompiles_nothing",
        "attention/test_ops::test_export_with_dynamic_sizes", "attention/test_ops::test_export_with_sizes_that_come_from_data",
        "gpu/test_runtime_gpu::test_compiled_with_inductor_for_all_lengths_and_no_batch"]),
    80: ("one placeholder returned twice", ["attention/test_ops::test_outputs_are_tensors_of_their_own"]),
    82: ("the wrong stream", [
        "gpu/test_runtime_gpu::test_the_current_stream_is_used_and_memory_stays_alive_for_it",
        "gpu/test_runtime_gpu::test_a_graph_replays_with_new_data", "gpu/test_softmax_gpu::test_the_current_stream_is_used"]),
    83: ("a device that is not the current one", [
        "gpu/test_runtime_gpu::test_a_device_that_is_not_current", "gpu/test_runtime_gpu::test_operands_on_two_devices_are_refused",
        "gpu/test_softmax_gpu::test_a_device_that_is_not_current"]),
    85: ("copying a module after a forward", [
        "attention/test_ops::test_a_module_can_be_copied_pickled_and_saved_after_a_forward",
        "attention/test_dropout::test_without_a_seed_torch_draws_it"]),
    88: ("rows of infinities", ["softmax/test_api::test_rows_with_infinities", "softmax/test_api::test_extremes_do_not_overflow"]),
    89: ("a large common offset", ["softmax/test_api::test_a_large_common_offset_costs_nothing"]),
    91: ("softmax beyond 2³¹ elements", [
        "gpu/test_softmax_gpu::test_more_than_2_to_31_elements", "gpu/test_softmax_gpu::test_2_to_31_rows_of_one",
        "gpu/test_softmax_gpu::test_one_row_beyond_2_to_31"]),
    93: ("softmax of strided tensors", [
        "softmax/test_api::test_layouts_in_every_dimension", "softmax/test_api::test_layouts_of_the_gradient",
        "softmax/test_api::test_a_negative_view_is_what_it_stands_for",
        "softmax/test_api::test_logical_not_storage_order"]),
    94: ("softmax over another dimension", [
        "softmax/test_api::test_every_dimension", "softmax/test_contract::test_refusals",
        "gpu/test_softmax_gpu::test_reductions_over_other_dimensions"]),
    95: ("softmax's dtype and that of its gradient", ["softmax/test_api::test_dtype_casts_first_and_the_gradient_comes_back"]),
    97: ("tiles that do not fit the card", [
        "attention/test_triton_tiles::test_a_card_takes_the_largest_class_it_holds",
        "gpu/test_inputs_gpu::test_tiles_of_wide_heads_fit_the_card"]),
    98: ("an import that needs a GPU, a compiler or torch", [
        "test_package::test_import_is_fast_and_needs_nothing", "test_package::test_unknown_names_and_missing_torch_say_so",
        "attention/test_dispatch::test_without_triton_the_reason_says_what_to_install"]),
}
LATER: dict[int, str] = {
    41: "fp8", 71: "a paged cache", 73: "a paged cache", 74: "a cache that is appended to", 86: "several devices",
    100: "benchmarks of softmax and decoding"}


def test_no_kind_is_lost() -> None:
    assert not KINDS.keys() & LATER.keys()
    assert len(KINDS) + len(LATER) == 68


@pytest.mark.parametrize("number", KINDS)
def test_every_kind_has_its_tests(number: int) -> None:
    fault, tests = KINDS[number]
    assert fault
    assert tests
    for test in tests:
        file, _, name = test.partition("::")
        functions = {node.name for node in ast.parse((TESTS / f"{file}.py").read_text()).body if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{fault}: there is no {test}"
