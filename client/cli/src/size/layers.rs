//! The state that each layer of a model keeps for a prompt.

use larder_protocol::limits::MAX_LAYERS;
use serde_json::Value;

use super::config::{ModelConfig, SizeError};

/// The state that one layer keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// Keys and values of every token.
    Full,
    /// Keys and values; only the state of this many last tokens is ever used.
    Sliding(u32),
    /// A state of fixed size (Mamba, linear attention).
    State,
    /// A state, and keys and values of every token.
    Both,
    /// Nothing (a feed-forward layer that counts as one).
    Nothing,
}

impl LayerKind {
    /// Whether the layer keeps keys and values of every token.
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Full | Self::Both)
    }

    /// Whether the layer keeps keys and values, and uses a window of them.
    pub fn is_sliding(&self) -> bool {
        matches!(self, Self::Sliding(_))
    }

    /// Whether the layer keeps keys and values.
    pub fn has_attention(&self) -> bool {
        self.is_full() || self.is_sliding()
    }

    /// Whether the layer keeps a state.
    pub fn has_state(&self) -> bool {
        matches!(self, Self::State | Self::Both)
    }

    /// The window, in tokens.
    pub fn window(&self) -> Option<u32> {
        if let Self::Sliding(window) = self { Some(*window) } else { None }
    }
}

/// Every layer of a model, first to last.
///
/// A config names the kinds of its layers in one of these ways; the first one present counts:
///
/// | field | families |
/// | --- | --- |
/// | `layer_types`, `layers_block_type`: a list of names | Gemma 3, gpt-oss, Qwen3-Next, Granite 4, Zamba2 |
/// | `hybrid_override_pattern`: a letter a layer | Nemotron-H |
/// | `attn_layer_indices`: a list of numbers | Bamba |
/// | `attn_layer_period`, `attn_layer_offset` | Jamba |
/// | `sliding_window` and `sliding_window_pattern`, every n-th is full | Gemma 2 (always 2) and 3, Cohere 2 |
/// | `sliding_window` and `use_sliding_window`, `max_window_layers` | Qwen2 |
/// | `sliding_window` alone, all layers | Mistral |
///
/// # Errors
/// [`SizeError`]: a field is missing or makes no sense.
pub fn of(config: &ModelConfig) -> Result<Vec<LayerKind>, SizeError> {
    for field in ["layer_types", "layers_block_type"] {
        if let Some(Value::Array(names)) = config.get(field) {
            let kinds = names.iter().map(|name| named(config, field, name)).collect::<Result<Vec<_>, _>>()?;
            return counted(config, field, kinds);
        }
    }
    if let Some(pattern) = config.text("hybrid_override_pattern") {
        let kinds = pattern.chars().map(lettered).collect::<Result<Vec<_>, _>>()?;
        return counted(config, "hybrid_override_pattern", kinds);
    }
    let layers = config.required(&["num_hidden_layers", "n_layer", "n_layers"])?;
    if layers > MAX_LAYERS {
        let (field, found) = ("num_hidden_layers".to_owned(), layers.to_string());
        return Err(SizeError::Field { field, found, expected: "at most 4,096" });
    }
    let hybrid = |is_attention: &dyn Fn(u32) -> bool| {
        (0..layers).map(|at| if is_attention(at) { LayerKind::Full } else { LayerKind::State }).collect()
    };
    if let Some(Value::Array(indices)) = config.get("attn_layer_indices") {
        return Ok(hybrid(&|at| indices.iter().any(|index| index.as_u64() == Some(at.into()))));
    }
    if let Some(period) = config.number(&["attn_layer_period"])? {
        let offset = config.get("attn_layer_offset").and_then(Value::as_u64).unwrap_or(0);
        return Ok(hybrid(&|at| u64::from(at % period) == offset));
    }
    if config.text("model_type") == Some("falcon_h1") {
        return Ok(vec![LayerKind::Both; layers as usize]);
    }
    windowed(config, layers)
}

/// The layers of a model of which some or all look back a window only.
fn windowed(config: &ModelConfig, layers: u32) -> Result<Vec<LayerKind>, SizeError> {
    let unused = config.get("use_sliding_window").and_then(Value::as_bool) == Some(false);
    let Some(window) = config.number(&["sliding_window"])?.filter(|_| !unused) else {
        return Ok(vec![LayerKind::Full; layers as usize]);
    };
    let pattern = match config.number(&["sliding_window_pattern", "_sliding_window_pattern"])? {
        None if config.text("model_type") == Some("gemma2") => Some(2),
        None if config.text("model_type").is_some_and(|name| name.starts_with("gemma3")) => Some(6),
        pattern => pattern,
    };
    let first = config.get("max_window_layers").and_then(Value::as_u64).unwrap_or(0);
    let is_full = |at: u32| match pattern {
        Some(pattern) => (at + 1).is_multiple_of(pattern),
        None => u64::from(at) < first,
    };
    let kind = |at| if is_full(at) { LayerKind::Full } else { LayerKind::Sliding(window) };
    Ok((0..layers).map(kind).collect())
}

fn named(config: &ModelConfig, field: &'static str, name: &Value) -> Result<LayerKind, SizeError> {
    let unknown =
        || SizeError::LayerKind { field, found: name.as_str().map_or(name.to_string(), Into::into) };
    match name.as_str().ok_or_else(unknown)? {
        "full_attention" | "attention" | "global_attention" => Ok(LayerKind::Full),
        "sliding_attention" | "local_attention" => {
            Ok(LayerKind::Sliding(config.required(&["sliding_window"])?))
        }
        "chunked_attention" => Ok(LayerKind::Sliding(config.required(&["attention_chunk_size"])?)),
        "mamba" | "mamba2" | "linear_attention" | "recurrent" => Ok(LayerKind::State),
        "hybrid" => Ok(LayerKind::Both),
        "mlp" | "moe" => Ok(LayerKind::Nothing),
        _ => Err(unknown()),
    }
}

fn lettered(letter: char) -> Result<LayerKind, SizeError> {
    match letter {
        'M' => Ok(LayerKind::State),
        '*' => Ok(LayerKind::Full),
        '-' | 'E' => Ok(LayerKind::Nothing),
        _ => Err(SizeError::LayerKind { field: "hybrid_override_pattern", found: letter.into() }),
    }
}

/// The kinds, unless the model says that it has another number of layers.
fn counted(
    config: &ModelConfig,
    field: &'static str,
    kinds: Vec<LayerKind>,
) -> Result<Vec<LayerKind>, SizeError> {
    match config.number(&["num_hidden_layers", "n_layer"])? {
        Some(layers) if layers as usize != kinds.len() => {
            Err(SizeError::LayerCount { layers, field, found: kinds.len() })
        }
        _ if kinds.is_empty() => Err(SizeError::NoLayers),
        _ => Ok(kinds),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(text: &str) -> Vec<LayerKind> {
        of(&ModelConfig::parse(text).unwrap()).unwrap()
    }

    fn complaint(text: &str) -> String {
        of(&ModelConfig::parse(text).unwrap()).unwrap_err().to_string()
    }

    #[test]
    fn every_way_to_say_which_layer_is_which_is_understood() {
        use LayerKind::{Both, Full, Nothing, Sliding, State};
        assert_eq!(kinds(r#"{"num_hidden_layers": 2}"#), [Full, Full]);
        assert_eq!(kinds(r#"{"hybrid_override_pattern": "M-*"}"#), [State, Nothing, Full]);
        assert_eq!(kinds(r#"{"layers_block_type": ["mamba", "hybrid"]}"#), [State, Both]);
        let jamba = r#"{"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1}"#;
        assert_eq!(kinds(jamba), [State, Full, State, Full]);
        let bamba = r#"{"num_hidden_layers": 3, "attn_layer_indices": [1]}"#;
        assert_eq!(kinds(bamba), [State, Full, State]);
        let gemma2 = r#"{"num_hidden_layers": 2, "sliding_window": 8, "model_type": "gemma2"}"#;
        assert_eq!(kinds(gemma2), [Sliding(8), Full]);
        let mistral = r#"{"num_hidden_layers": 2, "sliding_window": 8}"#;
        assert_eq!(kinds(mistral), [Sliding(8), Sliding(8)]);
        let qwen2 = r#"{"num_hidden_layers": 1, "sliding_window": 8, "use_sliding_window": false}"#;
        assert_eq!(kinds(qwen2), [Full]);
        let llama4 = r#"{"layer_types": ["chunked_attention"], "attention_chunk_size": 64}"#;
        assert_eq!(kinds(llama4), [Sliding(64)]);
    }

    #[test]
    fn layers_that_contradict_each_other_or_are_unknown_are_refused() {
        let text = r#"{"num_hidden_layers": 2, "layer_types": ["full_attention"]}"#;
        let names_one = "`num_hidden_layers` is 2, but `layer_types` names 1 layers";
        assert!(complaint(text).starts_with(names_one), "{}", complaint(text));
        assert!(complaint(r#"{"layer_types": ["magic"]}"#).contains("`magic`"));
        assert!(complaint(r#"{"layer_types": ["sliding_attention"]}"#).contains("--set sliding_window"));
        assert!(complaint("{}").contains("--set num_hidden_layers"));
    }
}
