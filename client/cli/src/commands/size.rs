//! `larder size`: the bytes of a model's KV.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use larder_protocol::limits::MAX_CHUNK_TOKENS;
use serde_json::Value;

use super::plan::positive;
use crate::failure::Usage;
use crate::size::measured::MeasuredSpeeds;
use crate::size::report::{Sizes, Surroundings};
use crate::size::{Deployment, Footprint, ModelConfig};
use crate::{output, values};

/// Compute the size of a model's KV, how much KV memory and disk hold, and how fast KV moves
///
/// The command reads the model's `config.json` (attention with grouped heads, MLA, sliding windows, Mamba and
/// linear-attention hybrids). Nodes check the registered namespaces of engines by the same formula.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder size config.json                              One rank, the model's element type
  larder size Qwen2.5-7B/config.json --tp 2 --chunk-tokens 16
  larder size config.json --dtype fp8 --memory 512GiB --disk 7TB --link 400
  larder bench --filter get --json > bench.json && larder size config.json --bench bench.json
                                                       How fast chunks move on this machine
  larder size config.json --set head_dim=128 --json    Add a field; print one JSON object")]
pub(crate) struct Args {
    /// The model's config.json, or its folder
    config: PathBuf,

    /// Tensor-parallel ranks
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_024))]
    tp: u32,

    /// Pipeline-parallel ranks
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_024))]
    pp: u32,

    /// Element type of the KV: auto (the model's own), fp16, bf16, fp32, fp8, int8
    #[arg(long, value_name = "TYPE", default_value = "auto")]
    dtype: String,

    /// Tokens of one chunk
    #[arg(long, value_name = "N", default_value_t = 256,
          value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_CHUNK_TOKENS)))]
    chunk_tokens: u32,

    /// Memory that holds chunks
    #[arg(long, value_name = "BYTES", value_parser = values::bytes, default_value = "64GiB")]
    memory: u64,

    /// Disk that holds chunks
    #[arg(long, value_name = "BYTES", value_parser = values::bytes, default_value = "1TiB")]
    disk: u64,

    /// Speed of the link between two nodes, in Gbit/s
    #[arg(long, value_name = "GBIT_PER_S", default_value_t = 100.0, value_parser = positive)]
    link: f64,

    /// Output of `larder bench --filter get --json` on such a machine: the measured speed of chunks
    #[arg(long, value_name = "FILE")]
    bench: Option<PathBuf>,

    /// Tokens that all ranks together compute in a second of prefill
    #[arg(long, value_name = "N", default_value_t = 10_000.0, value_parser = positive)]
    prefill_tokens_per_s: f64,

    /// Replace the value of a field of the config; may be given several times
    #[arg(long = "set", value_name = "FIELD=VALUE", value_parser = field)]
    fields: Vec<(String, Value)>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let sizes = args.sizes().with_context(|| Usage(format!("cannot size {}", args.config.display())))?;
    if args.json {
        output::print_json(&sizes)?;
    } else {
        output::print(&sizes.table())?;
    }
    Ok(ExitCode::SUCCESS)
}

impl Args {
    fn sizes(&self) -> anyhow::Result<Sizes> {
        let mut config = ModelConfig::read(&self.config)?;
        for (field, value) in &self.fields {
            config.set(field, value.clone());
        }
        let deployment = Deployment {
            tensor_parallel: self.tp,
            pipeline_parallel: self.pp,
            element_bytes: config.element_bytes(&self.dtype)?,
            chunk_tokens: self.chunk_tokens,
        };
        let footprint = Footprint::of(&config, deployment)?;
        if let Some((field, _)) = self.fields.iter().find(|(field, _)| !config.is_read(field)) {
            bail!("--set {field}: the size of this model does not depend on this field");
        }
        let measured = self.bench.as_ref().map(|file| {
            MeasuredSpeeds::read(file).with_context(|| format!("cannot read {}", file.display()))
        });
        let around = Surroundings {
            memory_bytes: self.memory,
            disk_bytes: self.disk,
            link_gbit_per_s: self.link,
            prefill_tokens_per_s: self.prefill_tokens_per_s,
            measured: measured.transpose()?,
        };
        Ok(Sizes::new(&footprint, deployment, &around))
    }
}

/// `field=value`, where the value is JSON, or else a text.
fn field(text: &str) -> Result<(String, Value), String> {
    let (name, value) = text.split_once('=').ok_or("not FIELD=VALUE, such as head_dim=128")?;
    Ok((name.into(), serde_json::from_str(value).unwrap_or_else(|_| value.into())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_numbers_where_they_can_be_and_texts_elsewhere() {
        assert_eq!(field("head_dim=128"), Ok(("head_dim".into(), 128.into())));
        assert_eq!(field("torch_dtype=bfloat16"), Ok(("torch_dtype".into(), "bfloat16".into())));
        assert!(field("head_dim").is_err());
    }
}
