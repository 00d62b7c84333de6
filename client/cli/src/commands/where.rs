//! `larder where`: how much of a prompt's prefix each node of a cluster holds.

use std::process::ExitCode;

use larder_coordinator::{NodeHeld, PrefixAnswer, PrefixHeld};
use larder_protocol::ChunkHash;
use larder_protocol::identity::Identity;
use serde::Serialize;

use crate::address::HostPort;
use crate::cluster::first_answer;
use crate::context::ClusterArg;
use crate::failure::{FAILED, Usage};
use crate::listing::{Cell, Format, FormatArgs, Listing, column};
use crate::prompt::PromptArgs;
use crate::{dev, http};

/// Ask the coordinator how much of a prompt each node holds
///
/// Routers ask the same question by `POST /v1/prefix`. The answer comes from the directory, which is a few moments behind the
/// nodes. A node may hold only a part of the prefix.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder where 0 1 2                       A prompt of a trace, in the newest development cluster
  larder where --namespace qwen.json --tokens prompt.json --coordinator 10.0.0.10:7600
  larder where 0 1 --tenant red --json     One object with `cluster`, `nodes` and `silent_homes`

Exit status: 1 if a home of some of the prompt's chunks did not answer. `larder lookup --help` explains namespace files;
`larder lookup` asks one node, on its socket, how much an engine would find.")]
pub(crate) struct Args {
    #[command(flatten)]
    prompt: PromptArgs,

    /// The tenant of the prompt
    #[arg(long, value_name = "TENANT", default_value = dev::TENANT)]
    tenant: String,

    #[command(flatten)]
    cluster: ClusterArg,

    #[command(flatten)]
    format: FormatArgs,
}

/// The question, as the coordinator reads it.
#[derive(Serialize)]
struct PrefixQuestion {
    fingerprint: String,
    chunk_tokens: u32,
    hashes: Vec<ChunkHashText>,
}

/// A hash of 64 hexadecimal digits.
type ChunkHashText = String;

/// The answer, with the size of the prompt.
#[derive(Debug, Serialize)]
struct PrefixReport {
    prompt_chunks: usize,
    chunk_tokens: u32,
    #[serde(flatten)]
    holdings: PrefixAnswer,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let (spec, prompt) = args.prompt.read()?;
    if Identity::engine(&args.tenant, "x").to_string().parse::<Identity>().is_err() {
        return Err(Usage(format!("--tenant: `{}` is no tenant's name", args.tenant)).into());
    }
    let coordinator = args.cluster.choose()?.coordinator;
    let fingerprint = spec.fingerprint(&args.tenant);
    let hashes = prompt.hashes(fingerprint, spec.chunk_tokens);
    let question = PrefixQuestion {
        fingerprint: ChunkHash(fingerprint.0).to_string(),
        chunk_tokens: spec.chunk_tokens,
        hashes: hashes.iter().map(ToString::to_string).collect(),
    };
    let ask = |one: &HostPort| http::post_json(one, "/v1/prefix", &question);
    let holdings = first_answer(coordinator.each(), ask)?;
    let answer = PrefixReport { prompt_chunks: hashes.len(), chunk_tokens: spec.chunk_tokens, holdings };
    args.format.print(&answer, |format| answer.text(format))?;
    let complete = answer.holdings.silent_homes.is_empty();
    Ok(if complete { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

impl PrefixReport {
    fn text(&self, format: Format) -> String {
        let mut list = Listing::new(&["holder", "chunks", "of", "tokens"].map(column));
        let PrefixAnswer { cluster, nodes, silent_homes, .. } = &self.holdings;
        let row = |name: &str, held: &PrefixHeld| {
            let numbers = [held.chunks as u64, self.prompt_chunks as u64, held.tokens].map(Cell::Count);
            [Cell::from(name)].into_iter().chain(numbers)
        };
        let mut nodes: Vec<&NodeHeld> = nodes.iter().collect();
        nodes.sort_by(|a, b| b.held.chunks.cmp(&a.held.chunks).then_with(|| a.name.cmp(&b.name)));
        nodes.into_iter().for_each(|NodeHeld { name, held, .. }| list.add(row(name, held)));
        list.add(row("all together", cluster));
        let mut text = list.text(format);
        if format != Format::Tsv && !silent_homes.is_empty() {
            text += &format!("{} did not answer: more may be held.", silent_homes.join(", "));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_node_with_most_chunks_comes_first_and_silent_homes_are_named() {
        let holdings = json!({
            "cluster": {"chunks": 3, "tokens": 1536},
            "nodes": [{"name": "a", "chunks": 1, "tokens": 512}, {"name": "b", "chunks": 3, "tokens": 1536}],
            "silent_homes": ["c"]
        });
        let holdings = serde_json::from_value(holdings).unwrap();
        let text = PrefixReport { prompt_chunks: 4, chunk_tokens: 512, holdings }.text(Format::Table);
        assert!(text.find("\nb ").unwrap() < text.find("\na ").unwrap(), "{text}");
        assert!(text.contains("1,536") && text.ends_with("c did not answer: more may be held."), "{text}");
    }
}
