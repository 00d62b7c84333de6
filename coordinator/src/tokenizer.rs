//! Turns text into the tokens of a model, by the model's `tokenizer.json`.
//!
//! Programs that were built without the feature `tokenizers` return an error instead.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

/// The tokenizer of a model.
#[derive(Debug)]
pub struct Tokenizer(Inner);

#[cfg(feature = "tokenizers")]
type Inner = tokenizers::Tokenizer;

#[cfg(not(feature = "tokenizers"))]
type Inner = std::convert::Infallible;

/// Why a text cannot be turned into tokens.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// This program was built without tokenizers.
    #[error(
        "this program was built without tokenizers: give token ids, or build it with `--features tokenizers`"
    )]
    NotBuilt,
    /// The file cannot be read.
    #[error("cannot read the tokenizer's file")]
    Read(#[from] io::Error),
    /// The file is too large.
    #[error("the tokenizer's file has more than {MAX_FILE_BYTES} bytes")]
    TooLarge,
    /// The file is no tokenizer.
    #[error(
        "cannot read the tokenizer: {why}; the file must be a tokenizer.json of Hugging Face's tokenizers"
    )]
    Wrong {
        /// The fault.
        why: String,
    },
    /// There is too much text.
    #[error("the text has more than {MAX_TEXT_BYTES} bytes: give its token ids")]
    TooLong,
    /// The tokenizer fails with the text.
    #[error("the tokenizer fails with this text: {why}")]
    Failed {
        /// The fault.
        why: String,
    },
}

impl Tokenizer {
    /// Reads a `tokenizer.json`. A file with many tokens takes a second, and some ten times its size in memory.
    ///
    /// # Errors
    /// [`TokenizerError`]: this program has no tokenizers, or the file is no tokenizer.
    pub fn read(path: &Path) -> Result<Self, TokenizerError> {
        // Reading something else than a file could wait for ever.
        if !path.metadata()?.is_file() {
            return Err(io::Error::from(io::ErrorKind::InvalidInput).into());
        }
        let mut bytes = Vec::new();
        File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > MAX_FILE_BYTES {
            return Err(TokenizerError::TooLarge);
        }
        understand(&bytes).map(Self)
    }

    /// The tokens of a text. With `special_tokens`, also the tokens that begin or end each prompt of the model.
    ///
    /// # Errors
    /// [`TokenizerError`]: the text is too long, or the tokenizer has no token for a part of it.
    pub fn tokens(&self, text: &str, special_tokens: bool) -> Result<Vec<u32>, TokenizerError> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(TokenizerError::TooLong);
        }
        encode(&self.0, text, special_tokens)
    }
}

#[cfg(feature = "tokenizers")]
fn understand(bytes: &[u8]) -> Result<Inner, TokenizerError> {
    let wrong = |why: String| TokenizerError::Wrong { why };
    let read = guard(|| Inner::from_bytes(bytes)).map_err(wrong)?;
    let mut tokenizer = read.map_err(|error| wrong(error.to_string()))?;
    // Files often cut or pad prompts for training; engines do not.
    tokenizer.with_truncation(None).map_err(|error| wrong(error.to_string()))?;
    tokenizer.with_padding(None);
    Ok(tokenizer)
}

#[cfg(feature = "tokenizers")]
fn encode(tokenizer: &Inner, text: &str, special_tokens: bool) -> Result<Vec<u32>, TokenizerError> {
    let failed = |why: String| TokenizerError::Failed { why };
    let encoded = guard(|| tokenizer.encode_fast(text, special_tokens)).map_err(failed)?;
    Ok(encoded.map_err(|error| failed(error.to_string()))?.get_ids().to_vec())
}

/// Catches panics of the library, which a file that was written by hand may cause.
#[cfg(feature = "tokenizers")]
fn guard<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    let worked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    worked.map_err(|_| "the library panicked".to_owned())
}

#[cfg(not(feature = "tokenizers"))]
fn understand(_: &[u8]) -> Result<Inner, TokenizerError> {
    Err(TokenizerError::NotBuilt)
}

#[cfg(not(feature = "tokenizers"))]
fn encode(tokenizer: &Inner, _: &str, _: bool) -> Result<Vec<u32>, TokenizerError> {
    match *tokenizer {}
}

/// Most bytes of a tokenizer's file; the largest models have 35 MB.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// Most bytes of a text: a quarter of a million tokens. Finding them takes 100 bytes for each.
const MAX_TEXT_BYTES: usize = 1 << 20;

#[cfg(feature = "tokenizers")]
#[cfg(test)]
mod tests {
    use super::*;

    /// Words, and a token in front.
    const WORDS: &str = r#"{
        "version": "1.0", "truncation": {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0,
            "pad_token": "<s>"},
        "added_tokens": [{"id": 0, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true}],
        "normalizer": null,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "\\s+(?!\\S)|\\s+|\\S+"}, "behavior": "Removed", "invert": true},
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}},
        "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"<s>": 0, "a": 1, "chunk": 2, " ": 3, "?": 4}, "unk_token": "?"}
    }"#;

    fn read(text: &[u8]) -> Result<Tokenizer, TokenizerError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        Tokenizer::read(file.path())
    }

    #[test]
    fn text_has_the_tokens_that_the_file_says_however_long_it_is() {
        let words = read(WORDS.as_bytes()).unwrap();
        assert_eq!(words.tokens("a chunk a chunk", true).unwrap(), [0, 1, 3, 2, 3, 1, 3, 2]);
        assert_eq!(words.tokens("a <s>", false).unwrap(), [1, 3, 0], "a special token may stand in the text");
        assert_eq!(words.tokens("", false).unwrap(), Vec::<u32>::new());
        assert_eq!(words.tokens("ü", false).unwrap(), [4]);
        let long = "a".repeat(MAX_TEXT_BYTES + 1);
        assert!(matches!(words.tokens(&long, false), Err(TokenizerError::TooLong)));
        assert_eq!(words.tokens(&"a ".repeat(MAX_TEXT_BYTES / 2), false).unwrap().len(), MAX_TEXT_BYTES);
    }

    #[test]
    fn a_file_that_is_no_tokenizer_is_refused() {
        for text in ["", "{}", "[1, 2]", "\u{1}garbage", "{\"model\": {\"type\": \"BPE\", \"vocab\": 3}}"] {
            assert!(matches!(read(text.as_bytes()), Err(TokenizerError::Wrong { .. })), "{text}");
        }
        let random: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(100_000).collect();
        assert!(matches!(read(&random), Err(TokenizerError::Wrong { .. })));
        for at in (0..WORDS.len()).step_by(7) {
            // Whatever the result is, there is no panic.
            drop(read(&[&WORDS.as_bytes()[..at], &WORDS.as_bytes()[at + 1..]].concat()));
            drop(read(&WORDS.as_bytes()[..at]));
        }
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(Tokenizer::read(folder.path()), Err(TokenizerError::Read(_))), "a folder");
        let large = folder.path().join("large");
        File::create(&large).unwrap().set_len(MAX_FILE_BYTES + 1).unwrap();
        assert!(matches!(Tokenizer::read(&large), Err(TokenizerError::TooLarge)));
    }
}
