//! Reads the inputs of AIPerf: Mooncake's form, but an id names only a block's tokens, not its prefix, and a session's later rows
//! hold only the new tokens of a turn.
//!
//! Further fields of a row; each may be missing:
//!
//! | field | meaning |
//! | --- | --- |
//! | `session_id` | the conversation; a later row of the same conversation continues its earlier prompts and answers |
//! | `delay` | milliseconds that a turn waits after the turn before |
//! | `timestamp` | milliseconds; a row without any time is played at the time of the row before |
//!
//! The file lacks the tokens of the answers, but no two answers are alike. So the blocks of a prompt from its first answer on
//! belong to its session alone.

use std::collections::HashMap;

use larder_protocol::limits::MAX_CHAIN_CHUNKS;
use serde::Deserialize;

use super::TraceError;
use super::wrong::size_that_fits;

/// A row of the file.
#[derive(Debug, Deserialize)]
pub(super) struct InputRow {
    pub(super) timestamp: Option<f64>,
    pub(super) delay: Option<f64>,
    pub(super) session_id: Option<String>,
    pub(super) input_length: u64,
    #[serde(default)]
    pub(super) output_length: u64,
    pub(super) hash_ids: Vec<u64>,
}

impl InputRow {
    /// Whether only AIPerf writes such rows: this one has a session or a delay, or no time.
    pub(super) fn is_of_aiperf(&self) -> bool {
        self.session_id.is_some() || self.delay.is_some() || self.timestamp.is_none()
    }
}

/// A prompt with chained ids.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Prompt {
    pub(super) at_ms: u64,
    /// Tokens of all its turns.
    pub(super) tokens: u64,
    pub(super) block_ids: Vec<u64>,
}

/// Gives blocks names that stand for their whole prefix, and puts the turns of sessions together.
#[derive(Debug, Default)]
pub(super) struct Chainer {
    names: HashMap<(Option<u64>, Box<[Piece]>), u64>,
    sessions: HashMap<String, Conversation>,
    last_ms: u64,
    /// Rows without a time.
    pub(super) untimed: usize,
}

#[derive(Debug, Default)]
struct Conversation {
    number: u64,
    at_ms: u64,
    turns: u64,
    said: Vec<FixedTokens>,
}

/// Tokens that always come together.
#[derive(Debug, Clone, Copy)]
struct FixedTokens {
    text: Text,
    tokens: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Text {
    Block(u64),
    Answer { session: u64, turn: u64 },
}

/// The part of some text that a block has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Piece {
    text: Text,
    from: u64,
    to: u64,
}

impl Chainer {
    /// The chained ids of a prompt with blocks of `tokens`; `ids` name only the tokens of each block.
    pub(super) fn chained(&mut self, ids: &[u64], tokens: u64, block_tokens: u64) -> Vec<u64> {
        self.blocks(&blocks_of(ids, tokens, block_tokens), block_tokens)
    }

    /// The prompt of a row.
    pub(super) fn prompt(
        &mut self,
        line: u64,
        row: InputRow,
        block_tokens: u64,
    ) -> Result<Prompt, TraceError> {
        let InputRow { timestamp, delay, session_id, input_length, output_length, hash_ids } = row;
        if input_length == 0 {
            return Err(TraceError::EmptyPrompt { line });
        }
        let (expected, found) = (input_length.div_ceil(block_tokens), hash_ids.len());
        if found as u64 != expected {
            let fits = size_that_fits(input_length, found as u64);
            let input_tokens = input_length;
            return Err(TraceError::BlockCount { line, input_tokens, block_tokens, expected, found, fits });
        }
        let number = self.sessions.len() as u64;
        let mut session = match &session_id {
            Some(id) => {
                self.sessions.remove(id).unwrap_or(Conversation { number, ..Conversation::default() })
            }
            None => Conversation::default(),
        };
        let at_ms = match (timestamp, delay) {
            (Some(at), _) => at.max(0.0).round() as u64,
            (None, Some(delay)) if session.turns > 0 => {
                session.at_ms.saturating_add(delay.max(0.0).round() as u64)
            }
            (None, _) => {
                self.untimed += 1;
                self.last_ms
            }
        };
        self.last_ms = at_ms;
        session.said.extend(blocks_of(&hash_ids, input_length, block_tokens));
        let tokens = session.said.iter().map(|said| said.tokens).fold(0, u64::saturating_add);
        let blocks = tokens.div_ceil(block_tokens) as usize;
        if blocks > MAX_CHAIN_CHUNKS {
            return Err(TraceError::PromptTooLong { line, blocks });
        }
        let block_ids = self.blocks(&session.said, block_tokens);
        if let Some(id) = session_id {
            let text = Text::Answer { session: session.number, turn: session.turns };
            session.said.push(FixedTokens { text, tokens: output_length });
            (session.turns, session.at_ms) = (session.turns + 1, at_ms);
            self.sessions.insert(id, session);
        }
        Ok(Prompt { at_ms, tokens, block_ids })
    }

    /// Names the blocks of a conversation.
    fn blocks(&mut self, said: &[FixedTokens], block_tokens: u64) -> Vec<u64> {
        let mut names = Vec::new();
        let (mut pieces, mut free) = (Vec::new(), block_tokens);
        for &FixedTokens { text, tokens } in said {
            let mut from = 0;
            while from < tokens {
                let to = tokens.min(from + free);
                pieces.push(Piece { text, from, to });
                free -= to - from;
                from = to;
                if free == 0 {
                    names.push(self.name(names.last().copied(), std::mem::take(&mut pieces)));
                    free = block_tokens;
                }
            }
        }
        if !pieces.is_empty() {
            names.push(self.name(names.last().copied(), pieces));
        }
        names
    }

    fn name(&mut self, parent: Option<u64>, pieces: Vec<Piece>) -> u64 {
        let next = self.names.len() as u64;
        *self.names.entry((parent, pieces.into())).or_insert(next)
    }
}

fn blocks_of(ids: &[u64], tokens: u64, block_tokens: u64) -> Vec<FixedTokens> {
    let left = |at: usize| tokens.saturating_sub(at as u64 * block_tokens).min(block_tokens);
    ids.iter().enumerate().map(|(at, &id)| FixedTokens { text: Text::Block(id), tokens: left(at) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(session: Option<&str>, input_length: u64, hash_ids: &[u64]) -> InputRow {
        let session_id = session.map(str::to_owned);
        InputRow {
            timestamp: None,
            delay: Some(1_000.0),
            session_id,
            input_length,
            output_length: 10,
            hash_ids: hash_ids.into(),
        }
    }

    fn ids(chainer: &mut Chainer, row: InputRow) -> Vec<u64> {
        chainer.prompt(1, row, 16).unwrap().block_ids
    }

    #[test]
    fn a_delay_beyond_all_clocks_is_the_last_time() {
        let mut chainer = Chainer::default();
        let late = || InputRow { delay: Some(f64::MAX), ..row(Some("a"), 16, &[1]) };
        let first = InputRow { timestamp: Some(5.0), ..late() };
        assert_eq!(chainer.prompt(1, first, 16).unwrap().at_ms, 5);
        assert_eq!(chainer.prompt(2, late(), 16).unwrap().at_ms, u64::MAX);
    }

    #[test]
    fn one_id_behind_two_prefixes_is_two_blocks_and_equal_prefixes_are_one() {
        let mut chainer = Chainer::default();
        let first = ids(&mut chainer, row(None, 40, &[1, 2, 3]));
        let other = ids(&mut chainer, row(None, 40, &[4, 2, 3]));
        assert!(first.iter().all(|id| !other.contains(id)));
        assert_eq!(ids(&mut chainer, row(None, 40, &[1, 2, 3])), first);
        let longer = ids(&mut chainer, row(None, 48, &[1, 2, 3]));
        assert_eq!((&longer[..2], longer[2] == first[2]), (&first[..2], false), "a partial block is its own");
        assert_eq!(ids(&mut chainer, row(None, 32, &[5, 5])).len(), 2, "an id may come twice in a prompt");
    }

    #[test]
    fn a_turn_goes_on_with_the_prompts_and_answers_of_its_session() {
        let mut chainer = Chainer::default();
        let first = chainer.prompt(1, row(Some("a"), 32, &[1, 2]), 16).unwrap();
        let other = chainer.prompt(2, row(Some("b"), 32, &[1, 2]), 16).unwrap();
        assert_eq!(first.block_ids, other.block_ids);
        let second = chainer.prompt(3, row(Some("a"), 16, &[7]), 16).unwrap();
        // 32 tokens, an answer of 10, and 16 new ones: three full blocks and one of 10 tokens.
        assert_eq!((second.tokens, second.block_ids.len()), (58, 4));
        assert_eq!(second.block_ids[..2], first.block_ids);
        let of_b = chainer.prompt(4, row(Some("b"), 16, &[7]), 16).unwrap();
        assert!(of_b.block_ids[2..].iter().all(|id| !second.block_ids.contains(id)), "answers differ");
        let third = chainer.prompt(5, row(Some("a"), 16, &[8]), 16).unwrap();
        assert_eq!((&third.block_ids[..3], third.tokens), (&second.block_ids[..3], 84));
    }

    #[test]
    fn a_turn_comes_its_delay_after_the_one_before_and_what_has_no_time_at_the_last_one() {
        let mut chainer = Chainer::default();
        let mut at = |row: InputRow| chainer.prompt(1, row, 16).unwrap().at_ms;
        assert_eq!(at(InputRow { timestamp: Some(5_000.4), ..row(Some("a"), 16, &[1]) }), 5_000);
        assert_eq!(at(InputRow { timestamp: Some(9_000.0), ..row(None, 16, &[1]) }), 9_000);
        assert_eq!(at(row(Some("a"), 16, &[2])), 6_000);
        assert_eq!(at(row(Some("new"), 16, &[2])), 6_000);
        assert_eq!(chainer.untimed, 1);
    }

    #[test]
    fn a_session_with_an_answer_that_is_too_long_is_refused_before_its_blocks_take_memory() {
        let mut chainer = Chainer::default();
        let answer = InputRow { output_length: u64::MAX, ..row(Some("a"), 16, &[1]) };
        chainer.prompt(1, answer, 16).unwrap();
        let error = chainer.prompt(2, row(Some("a"), 16, &[2]), 16).unwrap_err().to_string();
        assert!(error.starts_with("line 2: ") && error.contains("at most 8192"), "{error}");
    }

    #[test]
    fn ids_that_do_not_fit_the_tokens_are_refused_with_the_size_that_would() {
        let error = Chainer::default().prompt(7, row(None, 1_024, &[1, 2]), 16).unwrap_err().to_string();
        assert!(error.starts_with("line 7: 1024 tokens have 64 blocks of 16 tokens"), "{error}");
        assert!(error.contains("blocks of 512 tokens would fit"), "{error}");
        let empty = Chainer::default().prompt(7, row(None, 0, &[]), 16).unwrap_err().to_string();
        assert!(empty.contains("at least one token"), "{empty}");
    }
}
