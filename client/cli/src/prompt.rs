//! A prompt as the command line gives it: blocks of a trace, tokens, or hashes, in a namespace.

use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use larder_client::Namespace;
use larder_coordinator::Tokenizer;
use larder_protocol::hashing::{PromptExtra, hash_prompt};
use larder_protocol::namespace::HashAlgorithm;
use larder_protocol::sha256_cbor;
use larder_protocol::{Chain, ChunkHash, Fingerprint, NamespaceSpec};

use crate::content::TraceName;
use crate::failure::Usage;
use crate::replay::DEFAULT_BLOCK_BYTES;
use crate::replay::namespace::replay_namespace;
use crate::trace::{TraceReader, source};
use crate::{namespace_file, values};

/// The prompt's arguments.
#[derive(Debug, clap::Args)]
pub(crate) struct PromptArgs {
    /// Ids of the prompt's full blocks in the trace, first to last
    #[arg(conflicts_with_all = ["namespace"], value_name = "BLOCK_ID")]
    block_ids: Vec<u64>,

    /// The blocks' trace [default: the trace that `larder replay` generates]
    #[arg(long, value_name = "FILE", conflicts_with_all = ["tokens", "hashes", "seed"])]
    trace: Option<PathBuf>,

    /// Seed of the blocks' generated trace
    #[arg(long, value_name = "N", conflicts_with_all = ["tokens", "hashes"], default_value_t = 0)]
    seed: u64,

    /// The prompt's token ids: a JSON array, or numbers between white space; `-` reads standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["block_ids", "hashes"], requires = "namespace")]
    tokens: Option<PathBuf>,

    /// The hashes of the prompt's full chunks, first to last: 64 hexadecimal digits each, as a JSON array or between
    /// white space; `-` reads standard input
    #[arg(long, value_name = "FILE", conflicts_with = "block_ids")]
    hashes: Option<PathBuf>,

    #[command(flatten)]
    text: TextArgs,

    /// File of the namespace [default: the namespace of `larder replay`]
    #[arg(long, value_name = "FILE")]
    namespace: Option<PathBuf>,

    /// Bytes of one chunk's block in the namespace of `larder replay`
    #[arg(long, value_name = "BYTES", value_parser = values::bytes, default_value_t = DEFAULT_BLOCK_BYTES,
          conflicts_with = "namespace")]
    block_bytes: u64,
}

/// The arguments of a prompt that is given as text.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct TextArgs {
    /// The prompt's text as the engine gets it, after the chat template if there is one; `-` reads standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["tokens", "hashes"], requires_all = ["namespace", "tokenizer"])]
    pub(crate) text: Option<PathBuf>,

    /// The tokenizer.json of the model, for --text; the program needs the feature `tokenizers`
    #[arg(long, value_name = "FILE", requires = "text")]
    tokenizer: Option<PathBuf>,

    /// Do not add the tokens with which the model's prompts begin, since a chat template wrote them into the text
    #[arg(long, requires = "text")]
    without_special_tokens: bool,
}

/// A prompt: its tokens or hashes, before the namespace's root is known.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Prompt {
    Tokens(Vec<u32>),
    Hashes(Vec<ChunkHash>),
}

impl PromptArgs {
    /// The arguments of a prompt in files.
    pub(crate) fn of_files(
        tokens: &Option<PathBuf>,
        hashes: &Option<PathBuf>,
        text: &TextArgs,
        namespace: &Option<PathBuf>,
    ) -> Self {
        Self {
            block_ids: Vec::new(),
            trace: None,
            seed: 0,
            tokens: tokens.clone(),
            hashes: hashes.clone(),
            text: text.clone(),
            namespace: namespace.clone(),
            block_bytes: DEFAULT_BLOCK_BYTES,
        }
    }

    /// The namespace, and the prompt in it.
    ///
    /// # Errors
    /// No prompt is named, a file cannot be read, or the namespace's chunks are not hashed from tokens.
    pub(crate) fn read(&self) -> anyhow::Result<(NamespaceSpec, Prompt)> {
        let text = self.text.tokens()?;
        if self.block_ids.is_empty() && self.tokens.is_none() && self.hashes.is_none() && text.is_none() {
            return Err(Usage(NO_PROMPT.into()).into());
        }
        let spec = match &self.namespace {
            Some(path) => namespace_file::read(path)?,
            None => replay_namespace(self.block_bytes),
        };
        let prompt = match (text, &self.tokens, &self.hashes) {
            (Some(tokens), ..) => Prompt::Tokens(tokens),
            (None, Some(path), _) => Prompt::Tokens(read_list(path, |word| Ok(word.parse()?))?),
            (None, None, Some(path)) => Prompt::Hashes(read_list(path, |word| Ok(word.parse()?))?),
            (None, None, None) => {
                let trace = self.trace_name()?;
                Prompt::Hashes(self.block_ids.iter().map(|&id| trace.chunk(id)).collect())
            }
        };
        let (Prompt::Tokens(tokens), HashAlgorithm::Engine(engine)) = (&prompt, &spec.hash) else {
            return Ok((spec, prompt));
        };
        let Some(seed) = sha256_cbor::seed_of(&spec.hash) else {
            let text = format!(
                "the engine of this namespace hashes its chunks itself, by {}: give --hashes",
                engine.name
            );
            return Err(Usage(text).into());
        };
        let extra = sha256_cbor::PromptExtra::default();
        let hashes =
            sha256_cbor::hash_prompt(seed, tokens, spec.engine_block_tokens, spec.chunk_tokens, extra);
        Ok((spec, Prompt::Hashes(hashes)))
    }
}

impl TextArgs {
    /// The tokens of the text; `None` if there is none.
    fn tokens(&self) -> anyhow::Result<Option<Vec<u32>>> {
        let Some((text, tokenizer)) = self.text.as_ref().zip(self.tokenizer.as_ref()) else {
            return Ok(None);
        };
        let wrong = |path: &Path| Usage(format!("cannot use {}", path.display()));
        let read = Tokenizer::read(tokenizer).with_context(|| wrong(tokenizer))?;
        let tokens = read.tokens(&read_text(text)?, !self.without_special_tokens);
        Ok(Some(tokens.with_context(|| wrong(text))?))
    }
}

impl PromptArgs {
    /// The name of the prompt's trace, which the hashes of its chunks include.
    fn trace_name(&self) -> anyhow::Result<TraceName> {
        let Some(path) = &self.trace else { return Ok(TraceName::generated(self.seed)) };
        let wrong = || Usage(format!("cannot use the trace {}", path.display()));
        let lines = source::open(path).with_context(wrong)?;
        let requests = TraceReader::new(lines).read_all(Some(1)).with_context(wrong)?;
        Ok(TraceName::of(requests.first().context("the trace has no request").with_context(wrong)?))
    }
}

impl Prompt {
    /// The prompt's full chunks, in a namespace that is registered at a node.
    pub(crate) fn chain(&self, namespace: &Namespace) -> Chain {
        match self {
            Self::Tokens(tokens) => namespace.chain_of_tokens(tokens, PromptExtra::default()),
            Self::Hashes(hashes) => namespace.chain(hashes.clone()),
        }
    }

    /// The hashes of the prompt's full chunks, computed without a node.
    pub(crate) fn hashes(&self, fingerprint: Fingerprint, chunk_tokens: u32) -> Vec<ChunkHash> {
        match self {
            Self::Tokens(tokens) => {
                hash_prompt(fingerprint.root(), tokens, chunk_tokens, PromptExtra::default())
            }
            Self::Hashes(hashes) => hashes.clone(),
        }
    }
}

/// Reads a file, or standard input.
fn read_text(path: &Path) -> anyhow::Result<String> {
    let wrong = || Usage(format!("cannot use {}", path.display()));
    let mut text = String::new();
    if path.as_os_str() == "-" {
        io::stdin().lock().take(MAX_INPUT_BYTES).read_to_string(&mut text).with_context(wrong)?;
    } else {
        fs::File::open(path)
            .and_then(|file| file.take(MAX_INPUT_BYTES).read_to_string(&mut text))
            .with_context(wrong)?;
    }
    Ok(text)
}

/// Reads a JSON array, or words between white space.
fn read_list<T>(path: &Path, parse: impl Fn(&str) -> anyhow::Result<T>) -> anyhow::Result<Vec<T>> {
    let wrong = || Usage(format!("cannot use {}", path.display()));
    let text = read_text(path)?;
    let list = parse_list(&text, parse).with_context(wrong)?;
    if list.is_empty() {
        return Err(anyhow::anyhow!("the input is empty")).with_context(wrong);
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

/// The error for a command line without a prompt.
const NO_PROMPT: &str = "name a prompt: the ids of its blocks in a trace (`0 1 2`), its tokens (`--namespace FILE --tokens FILE`), \
    its text (`--namespace FILE --text FILE --tokenizer FILE`), or the hashes of its chunks (`--namespace FILE --hashes FILE`)";

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
    fn the_trace_of_a_prompts_blocks_may_be_packed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut packed = flate2::write::GzEncoder::new(file.as_file(), flate2::Compression::fast());
        let line = br#"{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [7]}"#;
        io::Write::write_all(&mut packed, line).unwrap();
        packed.finish().unwrap();
        let files = PromptArgs::of_files(&None, &None, &TextArgs::default(), &None);
        let args = PromptArgs { trace: Some(file.path().to_owned()), ..files };
        assert_ne!(args.trace_name().unwrap(), TraceName::generated(0));
    }

    #[test]
    fn hashes_are_read_from_both_kinds_of_list() {
        let hash = crate::content::chunk_hash(1);
        let parse = |text: &str| parse_list(text, |word| Ok(word.parse::<ChunkHash>()?)).unwrap();
        assert_eq!(parse(&format!("{hash}\n{hash}")), [hash; 2]);
        assert_eq!(parse(&format!("[\"{hash}\"]")), [hash]);
    }
}
