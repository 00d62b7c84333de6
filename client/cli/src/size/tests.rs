//! Models that people run, with their public configs.

use super::*;

const LLAMA_3_8B: &str = r#"{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16"}"#;

const QWEN_2_5_7B: &str = r#"{"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "torch_dtype": "bfloat16", "max_window_layers": 28,
    "sliding_window": 131072, "use_sliding_window": false}"#;

const DEEPSEEK_V3: &str = r#"{"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16"}"#;

const GEMMA_2_9B: &str = r#"{"model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42, "head_dim": 256,
    "num_attention_heads": 16, "num_key_value_heads": 8, "sliding_window": 4096, "torch_dtype": "bfloat16"}"#;

const GEMMA_3_27B: &str = r#"{"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": {
    "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 16, "sliding_window": 1024, "sliding_window_pattern": 6}}"#;

const JAMBA_V0_1: &str = r#"{"model_type": "jamba", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4,
    "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "torch_dtype": "bfloat16"}"#;

const NEMOTRON_H_8B: &str = r#"{"model_type": "nemotron_h", "hidden_size": 4096, "num_hidden_layers": 52,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_attention_heads": 32, "num_key_value_heads": 8, "attention_head_dim": 128, "mamba_num_heads": 128,
    "mamba_head_dim": 64, "ssm_state_size": 128, "conv_kernel": 4, "n_groups": 8, "torch_dtype": "bfloat16"}"#;

const QWEN3_NEXT_80B: &str = r#"{"model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "dtype": "bfloat16"}"#;

fn deployment(tensor_parallel: u32, chunk_tokens: u32) -> Deployment {
    Deployment { tensor_parallel, pipeline_parallel: 1, element_bytes: 2, chunk_tokens }
}

fn footprint(text: &str, deployment: Deployment) -> Footprint {
    Footprint::of(&ModelConfig::parse(text).unwrap(), deployment).unwrap()
}

fn complaint(text: &str, deployment: Deployment) -> String {
    Footprint::of(&ModelConfig::parse(text).unwrap(), deployment).unwrap_err().to_string()
}

#[test]
fn a_token_of_llama_3_8b_takes_128_kib_and_a_chunk_32_mib() {
    let one = footprint(LLAMA_3_8B, deployment(1, 256));
    assert_eq!((one.rank_token_bytes(), one.chunk_bytes()), (128 << 10, 32 << 20));
    let four = footprint(LLAMA_3_8B, deployment(4, 256));
    assert_eq!((four.rank_token_bytes(), four.chunk_bytes(), four.slices), (32 << 10, 32 << 20, 4));
}

#[test]
fn one_layer_of_qwen_2_5_7b_at_tp_2_takes_16_kib_for_16_tokens() {
    let footprint = footprint(QWEN_2_5_7B, deployment(2, 16));
    assert_eq!(footprint.full.layer_bytes(16), Some(16_384));
    assert_eq!((footprint.full.layers, footprint.sliding.layers), (28, 0), "its window is switched off");
    assert_eq!(footprint.rank_chunk_bytes(16), 28 * 16_384);
}

#[test]
fn more_ranks_than_kv_heads_keep_copies() {
    let footprint = footprint(QWEN_2_5_7B, deployment(8, 16));
    assert_eq!(footprint.full.kv_heads, 1);
    assert_eq!(footprint.chunk_bytes(), 8 * 28 * 8_192);
}

#[test]
fn more_heads_than_the_hidden_state_has_values_are_refused() {
    let error = complaint(
        r#"{"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 9}"#,
        deployment(1, 16),
    );
    assert!(error.contains("9 heads for a hidden size of 8: pass --set head_dim=VALUE"), "{error}");
}

#[test]
fn a_token_of_deepseek_v3_takes_the_same_70_272_bytes_at_any_tp() {
    for tp in [1, 8] {
        let footprint = footprint(DEEPSEEK_V3, deployment(tp, 64));
        assert_eq!(footprint.rank_token_bytes(), 61 * 576 * 2);
        assert_eq!((footprint.slices, footprint.chunk_bytes()), (1, 64 * 70_272));
    }
}

#[test]
fn pipeline_stages_share_the_layers_and_the_first_has_most() {
    let footprint = footprint(DEEPSEEK_V3, Deployment { pipeline_parallel: 4, ..deployment(8, 1) });
    assert_eq!((footprint.full.layers, footprint.slices), (16, 4));
    assert_eq!(footprint.chunk_bytes(), 70_272, "all stages together hold the whole");
}

#[test]
fn sliding_layers_of_gemma_are_told_apart() {
    let gemma_2 = footprint(GEMMA_2_9B, deployment(1, 16));
    assert_eq!((gemma_2.full.layers, gemma_2.sliding.layers, gemma_2.window), (21, 21, Some(4_096)));
    assert_eq!(gemma_2.rank_token_bytes(), 42 * 8 * 256 * 2 * 2);
    let stages = footprint(GEMMA_2_9B, Deployment { pipeline_parallel: 4, ..deployment(1, 16) });
    assert_eq!(
        stages.sliding_chunk_bytes * 2,
        stages.kv_chunk_bytes,
        "half of all layers, in whatever stages"
    );
    let gemma_3 = footprint(GEMMA_3_27B, deployment(1, 16));
    assert_eq!((gemma_3.full.layers, gemma_3.sliding.layers, gemma_3.window), (10, 52, Some(1_024)));
    assert_eq!(gemma_3.rank_token_bytes(), 62 * 16 * 128 * 2 * 2);
}

#[test]
fn jamba_keeps_four_layers_of_kv_and_28_states() {
    let footprint = footprint(JAMBA_V0_1, deployment(1, 256));
    assert_eq!((footprint.full.layers, footprint.state_layers), (4, 28));
    assert_eq!(footprint.rank_token_bytes(), 4 * 8 * 128 * 2 * 2);
    assert_eq!(footprint.state_bytes, 28 * (8_192 * 3 + 8_192 * 16) * 2);
    assert_eq!(footprint.chunk_bytes(), footprint.state_bytes + 256 * 16_384);
}

#[test]
fn nemotron_h_keeps_mamba_2_states_that_ranks_split() {
    let one = footprint(NEMOTRON_H_8B, deployment(1, 256));
    assert_eq!((one.full.layers, one.state_layers), (4, 24));
    let state = (128 * 64 + 2 * 8 * 128) * 3 + 128 * 64 * 128;
    assert_eq!(one.state_bytes, 24 * state * 2);
    let two = footprint(NEMOTRON_H_8B, deployment(2, 256));
    assert_eq!((two.state_bytes, two.state_chunk_bytes), (one.state_bytes / 2, one.state_bytes));
}

#[test]
fn gated_delta_nets_keep_a_matrix_a_head() {
    let footprint = footprint(QWEN3_NEXT_80B, deployment(1, 256));
    let state = (2 * 16 * 128 + 32 * 128) * 3 + 32 * 128 * 128;
    assert_eq!((footprint.state_layers, footprint.state_bytes), (3, 3 * state * 2));
}

#[test]
fn what_is_missing_or_cannot_be_split_is_named_with_what_to_pass() {
    let one = deployment(1, 16);
    let heads = complaint(r#"{"num_hidden_layers": 2, "hidden_size": 8}"#, one);
    assert_eq!(heads, "the config has no `num_attention_heads`: pass --set num_attention_heads=VALUE");
    let hidden = complaint(r#"{"num_hidden_layers": 2, "num_attention_heads": 8}"#, one);
    assert!(hidden.contains("--set hidden_size=VALUE"), "{hidden}");
    let rotary = complaint(r#"{"num_hidden_layers": 2, "kv_lora_rank": 512}"#, one);
    assert!(rotary.contains("--set qk_rope_head_dim=VALUE"), "{rotary}");
    let layers = complaint(
        &QWEN_2_5_7B.replace("\"num_hidden_layers\": 28", "\"num_hidden_layers\": 4294967295"),
        one,
    );
    assert_eq!(
        layers,
        "`num_hidden_layers` is 4294967295, not at most 4,096: pass --set num_hidden_layers=VALUE"
    );
    let state = complaint(&JAMBA_V0_1.replace("mamba_d_state", "x"), one);
    assert!(state.contains("--set mamba_d_state=VALUE"), "{state}");
    assert!(complaint(QWEN_2_5_7B, deployment(3, 16)).contains("4 KV heads cannot be split over 3 ranks"));
    let stages = Deployment { pipeline_parallel: 99, ..one };
    assert!(complaint(LLAMA_3_8B, stages).contains("choose a smaller --pp"));
    let huge = LLAMA_3_8B
        .replace("4096", "4294967295")
        .replace("\"num_key_value_heads\": 8", "\"num_key_value_heads\": 4294967295");
    assert!(complaint(&huge, deployment(1, 65_536)).contains("64 bits"));
}

#[test]
fn measured_speeds_decide_how_long_a_chunk_takes_unless_the_link_is_slower() {
    let deployment = deployment(1, 256);
    let footprint = footprint(LLAMA_3_8B, deployment);
    let file = tempfile::NamedTempFile::new().unwrap();
    let row = |name: &str, value: f64| serde_json::json!({"name": name, "value": value, "unit": "GB/s", "yardstick": "", "yardstick_value": 1.0, "ratio": 1.0});
    let rows = serde_json::json!([row("get_32MiB", 10.0), row("peer_get_32MiB", 2.5)]);
    std::fs::write(file.path(), rows.to_string()).unwrap();
    let sizes = |link_gbit_per_s| {
        let around = report::Surroundings {
            memory_bytes: 1 << 30,
            disk_bytes: 1 << 30,
            link_gbit_per_s,
            prefill_tokens_per_s: 10_000.0,
            measured: Some(measured::MeasuredSpeeds::read(file.path()).unwrap()),
        };
        report::Sizes::new(&footprint, deployment, &around)
    };
    let ms = |bytes_per_s: f64| f64::from(32 << 20) / bytes_per_s * 1e3;
    let fast = sizes(100.0).measured.unwrap();
    assert!((fast.host_chunk_ms - ms(10e9)).abs() < 1e-9 && (fast.peer_chunk_ms - ms(2.5e9)).abs() < 1e-9);
    let text = sizes(100.0).table();
    assert!(
        text.contains("a chunk from another node takes, measured") && text.contains("13.42 ms"),
        "{text}"
    );
    let slow = sizes(10.0);
    assert!((slow.measured.unwrap().peer_chunk_ms - slow.link_chunk_ms).abs() < 1e-9, "the link bounds it");
}
