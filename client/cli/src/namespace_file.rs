//! Reads a namespace from a JSON file.
//!
//! The file is one object; unknown fields are refused. Two engines share blocks only if all fields are equal:
//!
//! | field | meaning | default |
//! | --- | --- | --- |
//! | `model` | name or path of the model | – |
//! | `revision` | the model's revision | `""` |
//! | `kv_dtype` | data type of the KV, in the engine's words | – |
//! | `layout` | order of the dimensions inside a block, in the engine's words | – |
//! | `hash` | `"larder"`, or `{"engine": {"name": ..., "seed": ...}}` | `"larder"` |
//! | `chunk_tokens` | tokens of one chunk | 256 |
//! | `engine_block_tokens` | tokens of one engine block; divides `chunk_tokens` | 16 |
//! | `tensor_parallel`, `pipeline_parallel`, `context_parallel` | ranks | 1 |
//! | `slices` | parts of a chunk that ranks hold | 1 |
//! | `pools` | array of `{"name": ..., "layers": ..., "layer_bytes": ..., "hit": ...}`; the first is called `kv` | – |
//! | `hit` of a pool | which chunks of a prefix must have it: `"all"`, `"last"`, or `{"window": chunks}` | `"all"` |
//! | `flat` | whether keys stand for themselves, without order | `false` |

use std::fs;
use std::path::Path;

use anyhow::Context as _;
use larder_protocol::namespace::{EngineHash, HashAlgorithm};
use larder_protocol::{HitPolicy, NamespaceSpec, PoolSpec};
use serde::Deserialize;

use crate::failure::Usage;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NamespaceFile {
    model: String,
    #[serde(default)]
    revision: String,
    kv_dtype: String,
    layout: String,
    #[serde(default)]
    hash: Hash,
    #[serde(default = "default_chunk_tokens")]
    chunk_tokens: u32,
    #[serde(default = "default_engine_block_tokens")]
    engine_block_tokens: u32,
    #[serde(default = "one")]
    tensor_parallel: u16,
    #[serde(default = "one")]
    pipeline_parallel: u16,
    #[serde(default = "one")]
    context_parallel: u16,
    #[serde(default = "one")]
    slices: u16,
    pools: Vec<Pool>,
    #[serde(default)]
    flat: bool,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
enum Hash {
    #[default]
    Larder,
    Engine {
        name: String,
        #[serde(default)]
        seed: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Pool {
    name: String,
    layers: u32,
    layer_bytes: u64,
    #[serde(default)]
    hit: Hit,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "lowercase")]
enum Hit {
    #[default]
    All,
    Window(u32),
    Last,
}

/// Reads the namespace in the file at `path`.
pub(crate) fn read(path: &Path) -> anyhow::Result<NamespaceSpec> {
    let wrong = || Usage(format!("cannot use the namespace in {}", path.display()));
    let text = fs::read(path).with_context(wrong)?;
    parse(&text).with_context(wrong)
}

fn parse(text: &[u8]) -> anyhow::Result<NamespaceSpec> {
    let file: NamespaceFile = serde_json::from_slice(text)?;
    let pool = |Pool { name, layers, layer_bytes, hit }| {
        let hit = match hit {
            Hit::All => HitPolicy::All,
            Hit::Window(chunks) => HitPolicy::Window(chunks),
            Hit::Last => HitPolicy::Last,
        };
        PoolSpec { name, layers, layer_bytes, hit }
    };
    let spec = NamespaceSpec {
        model: file.model,
        revision: file.revision,
        kv_dtype: file.kv_dtype,
        layout: file.layout,
        hash: match file.hash {
            Hash::Larder => HashAlgorithm::Larder,
            Hash::Engine { name, seed } => HashAlgorithm::Engine(EngineHash { name, seed }),
        },
        chunk_tokens: file.chunk_tokens,
        engine_block_tokens: file.engine_block_tokens,
        tensor_parallel: file.tensor_parallel,
        pipeline_parallel: file.pipeline_parallel,
        context_parallel: file.context_parallel,
        slices: file.slices,
        pools: file.pools.into_iter().map(pool).collect(),
        flat: file.flat,
    };
    spec.check()?;
    Ok(spec)
}

fn default_chunk_tokens() -> u32 {
    256
}

fn default_engine_block_tokens() -> u32 {
    16
}

fn one() -> u16 {
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_needs_only_what_has_no_usual_value() {
        let spec = parse(
            br#"{"model": "m", "kv_dtype": "bfloat16", "layout": "nhd",
                 "pools": [{"name": "kv", "layers": 2, "layer_bytes": 4096}]}"#,
        )
        .unwrap();
        assert_eq!((spec.chunk_tokens, spec.engine_block_tokens, spec.slices), (256, 16, 1));
        assert_eq!(spec.hash, HashAlgorithm::Larder);
        assert_eq!(spec.pools[0].block_bytes(), 8_192);
    }

    #[test]
    fn an_engines_hash_has_a_name_and_a_seed() {
        let spec = parse(
            br#"{"model": "m", "kv_dtype": "x", "layout": "y", "hash": {"engine": {"name": "sha256", "seed": "0"}},
                 "pools": [{"name": "kv", "layers": 1, "layer_bytes": 1}]}"#,
        );
        let hash = EngineHash { name: "sha256".into(), seed: "0".into() };
        assert_eq!(spec.unwrap().hash, HashAlgorithm::Engine(hash));
    }

    #[test]
    fn unknown_fields_and_impossible_namespaces_are_refused() {
        let unknown = parse(br#"{"modle": "m"}"#).unwrap_err();
        assert!(format!("{unknown:#}").contains("unknown field `modle`"), "{unknown:#}");
        let impossible = parse(br#"{"model": "m", "kv_dtype": "x", "layout": "y", "pools": []}"#);
        assert!(impossible.is_err());
    }

    #[test]
    fn the_pools_of_a_hybrid_model_say_where_a_prefix_needs_them() {
        let pools = |hit: &str| {
            let text = format!(
                r#"{{"model": "m", "kv_dtype": "bfloat16", "layout": "nhd", "pools": [
                    {{"name": "kv", "layers": 2, "layer_bytes": 4096}},
                    {{"name": "mamba", "layers": 2, "layer_bytes": 4096, "hit": {hit}}}]}}"#
            );
            parse(text.as_bytes()).map(|spec| spec.pools[1].hit)
        };
        assert_eq!(pools(r#""last""#).unwrap(), HitPolicy::Last);
        assert_eq!(pools(r#"{"window": 3}"#).unwrap(), HitPolicy::Window(3));
        assert!(pools(r#"{"window": 0}"#).unwrap_err().to_string().contains("at least 1"));
    }
}
