//! `larder lookup`: how much of a prompt a node holds.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use larder_client::{LookupOptions, Session};
use larder_protocol::NamespaceSpec;
use larder_protocol::session::{Found, Span};
use serde::Serialize;

use crate::failure::FAILED;
use crate::listing::{Cell, FormatArgs, Listing, column};
use crate::prompt::{Prompt, PromptArgs};
use crate::{output, visit};

/// Show how much of a prompt a node holds
///
/// Name the prompt by the ids of a trace's blocks, by token ids, or by the hashes of its chunks. Each device of a node has a
/// cache of its own and answers for itself. At least one token of a prompt is always left to compute.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder lookup 0 1 2 3                   Ask the newest development cluster for a prompt of four full blocks of a trace
  larder lookup 0 1 --prompt-tokens 1024  A prompt without a token behind its two blocks: the last block must be computed
  larder lookup --namespace qwen.json --tokens prompt.json
  larder lookup --namespace qwen.json --hashes - --socket /run/larder/default.sock < hashes.txt

A namespace file is one JSON object: `model`, `kv_dtype`, `layout` and `pools` (an array of {\"name\": \"kv\",
\"layers\": N, \"layer_bytes\": N}) are required; `revision` (\"\"), `hash` (\"larder\" or {\"engine\": {\"name\": NAME,
\"seed\": SEED}}), `chunk_tokens` (256), `engine_block_tokens` (16), `tensor_parallel`, `pipeline_parallel`,
`context_parallel`, `slices` (1) and `flat` (false) have defaults.

Exit status: 1 if a node or device does not answer; the command prints the answers of the others.")]
pub(crate) struct Args {
    #[command(flatten)]
    prompt: PromptArgs,

    /// Tokens of the prompt [default: one more than its full chunks have]
    #[arg(long, value_name = "N", conflicts_with_all = ["tokens", "text"])]
    prompt_tokens: Option<u64>,

    /// The node's session socket [default: the sockets of all nodes of the newest development cluster, or
    /// /run/larder/default.sock]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    #[command(flatten)]
    format: FormatArgs,
}

/// The part of the prompt that one device of a node holds.
#[derive(Serialize)]
struct PrefixHeld {
    node: String,
    device: u16,
    prompt_tokens: u64,
    /// The most that may be found: full chunks, before the last token, which is always computed.
    tokens_possible: u64,
    tokens_found: u64,
    spans: Vec<HeldSpan>,
}

/// A run of chunks in one tier.
#[derive(Serialize)]
struct HeldSpan {
    tier: &'static str,
    from_chunk: u32,
    to_chunk: u32,
    tokens: u64,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let (spec, prompt) = args.prompt.read()?;
    let (mut held, mut errors) = (Vec::new(), Vec::new());
    for socket in visit::sockets(args.socket.as_ref())? {
        let asked = |session: Session| {
            let answer = ask(&session, &spec, &prompt, args.prompt_tokens);
            answer.with_context(|| format!("node {}", session.node()))
        };
        match visit::every_device(&socket).with_context(|| format!("{}", socket.display())) {
            Err(error) => errors.push(error),
            Ok(sessions) => {
                for answer in sessions.into_iter().map(asked) {
                    answer.map_or_else(|error| errors.push(error), |answer| held.push(answer));
                }
            }
        }
    }
    if held.is_empty() && !errors.is_empty() {
        return Err(errors.swap_remove(0));
    }
    args.format.print(&held, |format| list(&held).text(format))?;
    errors.iter().for_each(|error| output::note(format_args!("error: {error:#}")));
    Ok(if errors.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

fn ask(
    session: &Session,
    spec: &NamespaceSpec,
    prompt: &Prompt,
    prompt_tokens: Option<u64>,
) -> anyhow::Result<PrefixHeld> {
    let namespace = visit::register(session, spec)?;
    let chunk_tokens = u64::from(spec.chunk_tokens);
    let chain = prompt.chain(&namespace);
    let prompt_tokens = match prompt {
        Prompt::Tokens(tokens) => tokens.len() as u64,
        Prompt::Hashes(hashes) => prompt_tokens.unwrap_or(hashes.len() as u64 * chunk_tokens + 1),
    };
    let options = LookupOptions { prompt_tokens, ..LookupOptions::default() };
    let Found { tokens, spans, .. } = session.lookup(&namespace, &chain, options).wait()?;
    let span = |Span { from, to, tier }: Span| HeldSpan {
        tier: tier.name(),
        from_chunk: from,
        to_chunk: to,
        tokens: u64::from(to - from) * chunk_tokens,
    };
    Ok(PrefixHeld {
        node: session.node().to_owned(),
        device: session.device(),
        prompt_tokens,
        tokens_possible: possible(prompt_tokens, chunk_tokens).min(chain.len() as u64 * chunk_tokens),
        tokens_found: tokens,
        spans: spans.into_iter().map(span).collect(),
    })
}

/// The most tokens of a prompt that a lookup may find.
fn possible(prompt_tokens: u64, chunk_tokens: u64) -> u64 {
    let before_last = prompt_tokens.saturating_sub(1);
    before_last - before_last % chunk_tokens.max(1)
}

fn list(held: &[PrefixHeld]) -> Listing {
    let mut list =
        Listing::new(&["node", "device", "tier", "chunks", "tokens found", "of possible"].map(column));
    for PrefixHeld { node, device, tokens_possible, tokens_found, spans, .. } in held {
        let first = || [node.as_str().into(), Cell::Count((*device).into())].into_iter();
        for span in spans {
            let chunks = format!("{} to {}", span.from_chunk, span.to_chunk.saturating_sub(1));
            list.add(first().chain([span.tier.into(), chunks.into(), Cell::Count(span.tokens)]));
        }
        let share = *tokens_found as f64 / (*tokens_possible).max(1) as f64;
        let all = ["all".into(), Cell::Unknown, Cell::Count(*tokens_found), Cell::Share(share)];
        list.add(first().chain(all));
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listing::Format;

    #[test]
    fn a_full_hit_is_a_hundred_percent_though_a_token_is_left_to_compute() {
        for (prompt_tokens, chunk_tokens, most) in
            [(1_025, 512, 1_024), (1_024, 512, 512), (1, 512, 0), (0, 512, 0)]
        {
            assert_eq!(possible(prompt_tokens, chunk_tokens), most);
        }
        let full = PrefixHeld {
            node: "a".into(),
            device: 0,
            prompt_tokens: 1_025,
            tokens_possible: 1_024,
            tokens_found: 1_024,
            spans: Vec::new(),
        };
        let text = list(&[full]).text(Format::Table);
        assert!(text.contains("100.0 %"), "{text}");
    }
}
