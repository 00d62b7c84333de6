//! A model's `config.json`, of any family.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Map, Value};

/// The fields that describe the language model.
#[derive(Debug, Clone)]
pub struct ModelConfig {
    fields: Map<String, Value>,
    /// The outermost object: some fields are only there.
    outer: Map<String, Value>,
    /// The fields that were asked for.
    read: RefCell<BTreeSet<String>>,
}

/// Why a model's size cannot be computed.
#[derive(Debug, thiserror::Error)]
pub enum SizeError {
    /// The file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file is no JSON object.
    #[error("{path} is not a model's config.json")]
    NotAnObject {
        /// The file.
        path: String,
        /// The JSON reader's error.
        source: serde_json::Error,
    },
    /// A needed field is missing.
    #[error("the config has no `{field}`: pass --set {field}=VALUE")]
    Missing {
        /// The field.
        field: &'static str,
    },
    /// A field has a wrong value.
    #[error("`{field}` is {found}, not {expected}: pass --set {field}=VALUE")]
    Field {
        /// The field.
        field: String,
        /// The value found.
        found: String,
        /// The expected value.
        expected: &'static str,
    },
    /// An element type that is not known.
    #[error(
        "no element type is called `{name}`; there are: float32, float16 (fp16), bfloat16 (bf16), fp8, int8: pass --dtype"
    )]
    Dtype {
        /// The name.
        name: String,
    },
    /// KV heads cannot be split over the ranks.
    #[error(
        "{kv_heads} KV heads cannot be split over {tensor_parallel} ranks: choose --tp that divides them, or a multiple of them"
    )]
    Heads {
        /// KV heads of the model.
        kv_heads: u32,
        /// Ranks.
        tensor_parallel: u32,
    },
    /// More heads than values to split over them.
    #[error("the config has {heads} heads for a hidden size of {hidden}: pass --set head_dim=VALUE")]
    HeadSize {
        /// Values of a token's hidden state.
        hidden: u32,
        /// Attention heads.
        heads: u32,
    },
    /// More pipeline stages than layers.
    #[error(
        "{layers} layers cannot be split over {pipeline_parallel} pipeline stages: choose a smaller --pp"
    )]
    TooManyStages {
        /// Stages.
        pipeline_parallel: u32,
        /// Layers of the model.
        layers: usize,
    },
    /// Layers and their list of kinds disagree.
    #[error(
        "`num_hidden_layers` is {layers}, but `{field}` names {found} layers: pass --set num_hidden_layers=VALUE, or correct the file"
    )]
    LayerCount {
        /// Layers of the model.
        layers: u32,
        /// The list.
        field: &'static str,
        /// The length of the list that was found.
        found: usize,
    },
    /// An unknown kind of layer.
    #[error("`{field}` has a layer `{found}` that this program does not know")]
    LayerKind {
        /// The list.
        field: &'static str,
        /// The kind.
        found: String,
    },
    /// A model of no layers.
    #[error("`num_hidden_layers` is 0: pass --set num_hidden_layers=VALUE")]
    NoLayers,
    /// A size beyond 64 bits.
    #[error("the sizes in the config exceed 64 bits; is this a model's config.json?")]
    TooLarge,
}

impl ModelConfig {
    /// Reads a file.
    ///
    /// # Errors
    /// [`SizeError::Read`] or [`SizeError::NotAnObject`].
    pub fn read(path: &Path) -> Result<Self, SizeError> {
        let name = || path.display().to_string();
        // A model's folder stands for the file in it.
        let file = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
        let text =
            std::fs::read_to_string(file).map_err(|source| SizeError::Read { path: name(), source })?;
        Self::parse(&text).map_err(|source| SizeError::NotAnObject { path: name(), source })
    }

    /// Reads a text.
    ///
    /// # Errors
    /// The text is no JSON object.
    pub fn parse(text: &str) -> Result<Self, serde_json::Error> {
        let outer: Map<String, Value> = serde_json::from_str(text)?;
        let mut fields = outer.clone();
        while let Some(Value::Object(inner)) = NESTED.iter().find_map(|&name| fields.get(name)) {
            fields = inner.clone();
        }
        Ok(Self { fields, outer, read: RefCell::default() })
    }

    /// Replaces a field's value, or adds the field.
    pub fn set(&mut self, field: &str, value: Value) {
        self.fields.insert(field.into(), value);
    }

    /// A field of the language model, else of the outermost object; `None` if it is absent or `null`.
    pub fn get(&self, field: &str) -> Option<&Value> {
        self.read.borrow_mut().insert(field.to_owned());
        let known = |value: &&Value| !value.is_null();
        self.fields.get(field).filter(known).or_else(|| self.outer.get(field).filter(known))
    }

    /// Whether the field was asked for.
    pub fn is_read(&self, field: &str) -> bool {
        self.read.borrow().contains(field)
    }

    /// A text.
    pub fn text(&self, field: &str) -> Option<&str> {
        self.get(field)?.as_str()
    }

    /// The first of these fields that is there, as a number above 0.
    ///
    /// # Errors
    /// [`SizeError::Field`]: it is something else.
    pub fn number(&self, names: &[&'static str]) -> Result<Option<u32>, SizeError> {
        let Some((field, value)) = names.iter().find_map(|&name| Some((name, self.get(name)?))) else {
            return Ok(None);
        };
        let number =
            value.as_u64().and_then(|number| u32::try_from(number).ok()).filter(|&number| number > 0);
        let wrong = || SizeError::Field {
            field: field.into(),
            found: value.to_string(),
            expected: "a whole number above 0",
        };
        number.map(Some).ok_or_else(wrong)
    }

    /// The number in a field that must be there.
    ///
    /// # Errors
    /// As [`Self::number`], and [`SizeError::Missing`] with the first name.
    pub fn required(&self, names: &[&'static str]) -> Result<u32, SizeError> {
        self.number(names)?.ok_or(SizeError::Missing { field: names[0] })
    }

    /// Bytes of one element of the KV: of `dtype`, or of the model's own type if `dtype` is `auto`.
    ///
    /// # Errors
    /// [`SizeError::Missing`] or [`SizeError::Dtype`].
    pub fn element_bytes(&self, dtype: &str) -> Result<u32, SizeError> {
        if dtype != "auto" {
            return element_bytes(dtype);
        }
        let own = self.text("torch_dtype").or_else(|| self.text("dtype"));
        element_bytes(own.ok_or(SizeError::Missing { field: "torch_dtype" })?)
    }
}

/// Fields for the language model in the configs of models that also take pictures or sound.
const NESTED: [&str; 5] =
    ["text_config", "llm_config", "language_config", "thinker_config", "language_model"];

/// Bytes of one element of this type.
///
/// # Errors
/// [`SizeError::Dtype`].
pub fn element_bytes(dtype: &str) -> Result<u32, SizeError> {
    let name = dtype.strip_prefix("torch.").unwrap_or(dtype);
    match name {
        "float32" | "fp32" | "float" => Ok(4),
        "float16" | "fp16" | "half" | "bfloat16" | "bf16" => Ok(2),
        "int8" => Ok(1),
        _ if name.starts_with("fp8") || name.starts_with("float8") => Ok(1),
        _ => Err(SizeError::Dtype { name: dtype.into() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_language_model_inside_another_is_found_and_misses_nothing_of_the_outside() {
        let text =
            r#"{"torch_dtype": "bfloat16", "text_config": {"num_hidden_layers": 3, "head_dim": null}}"#;
        let config = ModelConfig::parse(text).unwrap();
        assert_eq!(config.required(&["num_hidden_layers"]).unwrap(), 3);
        assert_eq!(config.number(&["head_dim"]).unwrap(), None);
        assert_eq!(config.element_bytes("auto").unwrap(), 2);
        assert_eq!(config.element_bytes("fp8_e4m3").unwrap(), 1);
    }

    #[test]
    fn errors_name_the_field_and_what_to_pass() {
        let config = ModelConfig::parse(r#"{"num_hidden_layers": "many"}"#).unwrap();
        let complaint = config.required(&["num_hidden_layers"]).unwrap_err().to_string();
        assert_eq!(
            complaint,
            "`num_hidden_layers` is \"many\", not a whole number above 0: pass --set num_hidden_layers=VALUE"
        );
        let complaint = config.required(&["hidden_size", "n_embd"]).unwrap_err().to_string();
        assert_eq!(complaint, "the config has no `hidden_size`: pass --set hidden_size=VALUE");
        assert!(config.element_bytes("int3").unwrap_err().to_string().contains("bfloat16"));
        assert!(config.element_bytes("auto").unwrap_err().to_string().contains("torch_dtype"));
    }
}
