//! `larder lookup`: how much of a prompt a node holds.

use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use larder_client::{BlockingSession, LookupOptions, Namespace, SessionError, SessionOptions};
use larder_node::metrics::tier_name;
use larder_protocol::hashing::PromptExtra;
use larder_protocol::namespace::HashAlgorithm;
use larder_protocol::session::{Found, RefusalCode, Span};
use larder_protocol::{Chain, ChunkHash, NamespaceSpec};
use serde::Serialize;

use crate::failure::Usage;
use crate::replay::DEFAULT_BLOCK_BYTES;
use crate::replay::namespace::replay_namespace;
use crate::{args, content, dev, namespace_file, output};

/// Ask a node how much of a prompt it holds
///
/// The prompt is given by the ids of a trace's blocks, by token ids, or by the hashes of its chunks. Each device of a
/// node has a cache of its own and is asked. At least one token of a prompt is always left to compute.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder lookup 0 1 2 3                   Ask the newest development cluster for a prompt of four full blocks of a trace
  larder lookup 0 1 --prompt-tokens 1024  The same without a token behind its blocks: the last one must be computed
  larder lookup --namespace qwen.json --tokens prompt.json
  larder lookup --namespace qwen.json --hashes - --socket /run/larder/default.sock < hashes.txt

A namespace file is one JSON object: `model`, `kv_dtype`, `layout` and `pools` (an array of {\"name\": \"kv\",
\"layers\": N, \"layer_bytes\": N}) must be there; `revision` (\"\"), `hash` (\"larder\" or {\"engine\": {\"name\": NAME,
\"seed\": SEED}}), `chunk_tokens` (256), `engine_block_tokens` (16), `tensor_parallel`, `pipeline_parallel`,
`context_parallel`, `slices` (1) and `flat` (false) may be.")]
pub(crate) struct Args {
    /// Ids of the prompt's full blocks, as the trace has them, first to last
    #[arg(required_unless_present_any = ["tokens", "hashes"], conflicts_with_all = ["namespace"], value_name = "BLOCK_ID")]
    block_ids: Vec<u64>,

    /// The prompt's token ids: a JSON array, or numbers between white space; `-` reads standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["block_ids", "hashes", "prompt_tokens"], requires = "namespace")]
    tokens: Option<PathBuf>,

    /// The hashes of the prompt's full chunks, first to last: 64 hexadecimal digits each, as a JSON array or between
    /// white space; `-` reads standard input
    #[arg(long, value_name = "FILE", conflicts_with = "block_ids")]
    hashes: Option<PathBuf>,

    /// Tokens of the prompt [default: one more than its full chunks have]
    #[arg(long, value_name = "N")]
    prompt_tokens: Option<u64>,

    /// The namespace [default: that of `larder replay`]
    #[arg(long, value_name = "FILE")]
    namespace: Option<PathBuf>,

    /// Bytes of one chunk's block in the namespace of `larder replay`
    #[arg(long, value_name = "BYTES", value_parser = args::bytes, default_value_t = DEFAULT_BLOCK_BYTES,
          conflicts_with = "namespace")]
    block_bytes: u64,

    /// The node's session socket [default: that of every node of the newest development cluster]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Print JSON: an array with one object for each device
    #[arg(long)]
    json: bool,
}

/// What one device of a node holds.
#[derive(Serialize)]
struct Held {
    node: String,
    device: u16,
    prompt_tokens: u64,
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

/// A prompt, as far as it can be read without knowing the namespace's root.
enum Prompt {
    Tokens(Vec<u32>),
    Hashes(Vec<ChunkHash>),
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let spec = match &args.namespace {
        Some(path) => namespace_file::read(path)?,
        None => replay_namespace(args.block_bytes),
    };
    let prompt = args.prompt()?;
    if matches!((&prompt, &spec.hash), (Prompt::Tokens(_), HashAlgorithm::Engine(_))) {
        return Err(
            Usage("the engine of this namespace hashes its chunks itself: give --hashes".into()).into()
        );
    }
    let sockets = match &args.socket {
        Some(socket) => vec![socket.clone()],
        None => dev::newest()?.nodes.into_iter().flat_map(|node| node.sockets.into_values()).collect(),
    };
    let mut held = Vec::new();
    for socket in sockets {
        held.extend(ask_node(&socket, &spec, &prompt, args.prompt_tokens)?);
    }
    if args.json {
        output::print_json(&held)?;
    } else {
        output::print(&table(&held))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Asks every device of a node.
fn ask_node(
    socket: &Path,
    spec: &NamespaceSpec,
    prompt: &Prompt,
    prompt_tokens: Option<u64>,
) -> anyhow::Result<Vec<Held>> {
    let mut held = Vec::new();
    for device in 0.. {
        let options = SessionOptions {
            client: concat!("larder lookup ", env!("CARGO_PKG_VERSION")).into(),
            device: Some(device),
            window_bytes: 0,
            ..SessionOptions::default()
        };
        let session = match BlockingSession::connect(socket, options) {
            Err(SessionError::Refused(refusal)) if device > 0 && refusal.code == RefusalCode::Unknown => {
                break;
            }
            session => session?,
        };
        held.push(
            ask(&session, spec, prompt, prompt_tokens).with_context(|| format!("node {}", session.node()))?,
        );
    }
    Ok(held)
}

fn ask(
    session: &BlockingSession,
    spec: &NamespaceSpec,
    prompt: &Prompt,
    prompt_tokens: Option<u64>,
) -> anyhow::Result<Held> {
    let slices: Vec<u16> = (0..spec.slices).collect();
    let block_bytes: Vec<u64> = spec.pools.iter().map(|pool| pool.block_bytes()).collect();
    let namespace = session.register(spec, &slices, &block_bytes)?;
    let chunk_tokens = u64::from(spec.chunk_tokens);
    let chain = prompt.chain(&namespace);
    let prompt_tokens = match prompt {
        Prompt::Tokens(tokens) => tokens.len() as u64,
        Prompt::Hashes(hashes) => prompt_tokens.unwrap_or(hashes.len() as u64 * chunk_tokens + 1),
    };
    let options = LookupOptions { prompt_tokens, ..LookupOptions::default() };
    let Found { tokens, spans, .. } = session.lookup(&namespace, &chain, options)?;
    let span = |Span { from, to, tier }: Span| HeldSpan {
        tier: tier_name(tier),
        from_chunk: from,
        to_chunk: to,
        tokens: u64::from(to - from) * chunk_tokens,
    };
    Ok(Held {
        node: session.node().to_owned(),
        device: session.device(),
        prompt_tokens,
        tokens_found: tokens,
        spans: spans.into_iter().map(span).collect(),
    })
}

fn table(held: &[Held]) -> String {
    let mut table = output::table(&["node", "device", "tier", "chunks", "tokens found", "of prompt"]);
    for Held { node, device, prompt_tokens, tokens_found, spans } in held {
        let share = 100.0 * *tokens_found as f64 / (*prompt_tokens).max(1) as f64;
        let total = [String::new(), "all".into(), tokens_found.to_string(), format!("{share:.1} %")];
        let rows = spans.iter().map(|span| {
            let chunks = format!("{} to {}", span.from_chunk, span.to_chunk.saturating_sub(1));
            [span.tier.to_owned(), chunks, span.tokens.to_string(), String::new()]
        });
        for row in rows.chain([total]) {
            table.add_row([node.clone(), device.to_string()].into_iter().chain(row));
        }
    }
    for column in [4, 5] {
        output::align_right(&mut table, column);
    }
    table.to_string()
}

impl Args {
    fn prompt(&self) -> anyhow::Result<Prompt> {
        Ok(match (&self.tokens, &self.hashes) {
            (Some(path), _) => Prompt::Tokens(read_list(path, |word| Ok(word.parse()?))?),
            (None, Some(path)) => Prompt::Hashes(read_list(path, |word| Ok(word.parse()?))?),
            (None, None) => {
                Prompt::Hashes(self.block_ids.iter().map(|&id| content::chunk_hash(id)).collect())
            }
        })
    }
}

impl Prompt {
    fn chain(&self, namespace: &Namespace) -> Chain {
        match self {
            Self::Tokens(tokens) => namespace.chain_of_tokens(tokens, PromptExtra::default()),
            Self::Hashes(hashes) => namespace.chain(hashes.clone()),
        }
    }
}

/// Reads a JSON array, or words between white space.
fn read_list<T>(path: &Path, parse: impl Fn(&str) -> anyhow::Result<T>) -> anyhow::Result<Vec<T>> {
    let wrong = || Usage(format!("cannot use {}", path.display()));
    let mut text = String::new();
    if path.as_os_str() == "-" {
        io::stdin().lock().take(MAX_INPUT_BYTES).read_to_string(&mut text).with_context(wrong)?;
    } else {
        fs::File::open(path)
            .and_then(|file| file.take(MAX_INPUT_BYTES).read_to_string(&mut text))
            .with_context(wrong)?;
    }
    let list = parse_list(&text, parse).with_context(wrong)?;
    if list.is_empty() {
        return Err(anyhow::anyhow!("it is empty")).with_context(wrong);
    }
    Ok(list)
}

fn parse_list<T>(text: &str, parse: impl Fn(&str) -> anyhow::Result<T>) -> anyhow::Result<Vec<T>> {
    let words: Vec<String> = if text.trim_start().starts_with('[') {
        let array: Vec<serde_json::Value> = serde_json::from_str(text)?;
        let word = |value| match value {
            serde_json::Value::String(word) => Ok(word),
            serde_json::Value::Number(number) => Ok(number.to_string()),
            other => bail!("`{other}` is neither a number nor a text"),
        };
        array.into_iter().map(word).collect::<anyhow::Result<_>>()?
    } else {
        text.split_whitespace().map(str::to_owned).collect()
    };
    words.iter().map(|word| parse(word).with_context(|| format!("`{word}`"))).collect()
}

/// Far more than the longest prompt has.
const MAX_INPUT_BYTES: u64 = 256 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(text: &str) -> anyhow::Result<Vec<u32>> {
        parse_list(text, |word| Ok(word.parse()?))
    }

    #[test]
    fn lists_are_json_or_words() {
        assert_eq!(numbers(" [1, 2,\n3] ").unwrap(), [1, 2, 3]);
        assert_eq!(numbers("1 2\n3\t").unwrap(), [1, 2, 3]);
        assert!(numbers("").unwrap().is_empty());
    }

    #[test]
    fn what_is_wrong_in_a_list_is_named() {
        for text in ["1 x", "[1, \"x\"]"] {
            let error = numbers(text).unwrap_err();
            assert!(format!("{error:#}").starts_with("`x`: invalid digit"), "{error:#}");
        }
        assert!(numbers("[1, {}]").is_err() && numbers("[1").is_err() && numbers("-1").is_err());
    }

    #[test]
    fn hashes_are_read_from_both_kinds_of_list() {
        let hash = content::chunk_hash(1);
        let parse = |text: &str| parse_list(text, |word| Ok(word.parse::<ChunkHash>()?)).unwrap();
        assert_eq!(parse(&format!("{hash}\n{hash}")), [hash; 2]);
        assert_eq!(parse(&format!("[\"{hash}\"]")), [hash]);
    }
}
