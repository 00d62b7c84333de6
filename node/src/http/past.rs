//! `GET /past`: a node's last lookups as hashes. The coordinator plays the lookups of all nodes together.
//!
//! A chunk's hash names the whole prefix up to it. So each chunk is listed once, with the chunk before it, and a lookup names
//! only its last chunk.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use larder_core::what_if::PastLookup;
use larder_net::blocking::blocking;
use serde::{Deserialize, Serialize};

use super::HttpState;
use super::show::{Arguments, Refused};
use super::what_if::seen;
use super::why::Now;

/// The body of `GET /past`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PastStatus {
    /// The policy in force; empty if nothing is cached yet.
    pub policy: String,
    /// Chunks that memory and disk keep at present. With `write_through`, those in memory are on disk too, and count once.
    pub capacity_chunks: u64,
    /// Bytes of a chunk, on average over the cached chunks.
    pub chunk_bytes: u64,
    /// Whether the node reads chunks of other nodes.
    pub shares: bool,
    /// A name for each chunk of the lookups: a number of 64 bits.
    pub names: Vec<u64>,
    /// For each of these chunks, the place in `names` of the chunk before it, counted from 1; 0 at the beginning of a prompt.
    pub parents: Vec<u32>,
    /// The lookups, the newest first.
    pub lookups: Vec<PastLookupStatus>,
    /// Lookups that are left out because they contradict newer lookups or find no room.
    pub left_out_lookups: u64,
}

/// A lookup in [`PastStatus`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PastLookupStatus {
    /// The time of the lookup: milliseconds since 1970.
    pub unix_ms: u64,
    /// Tokens of one chunk.
    pub chunk_tokens: u32,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens that were found.
    pub tokens_hit: u64,
    /// The place in `names` of the prompt's last full chunk, counted from 1; 0 if the prompt has no full chunk.
    pub last: u32,
}

/// The last lookups of all actors. `most_chunks` bounds the chunks of all lookups together; a chunk counts once for each lookup.
pub(super) async fn past(state: &HttpState, arguments: &Arguments) -> Result<PastStatus, Refused> {
    let most = arguments.get(MOST_CHUNKS).map(|most| most.parse::<usize>());
    let most = most.transpose().map_err(|error| Refused::Question(format!("{MOST_CHUNKS}: {error}")))?;
    let (lookups, present) = seen(state).await;
    let shares = state.cluster.get().is_some_and(|report| report().shares);
    let now = Now::of(state);
    let unix_ms = move |lookup: &PastLookup| now.unix_ms(lookup.at);
    let listed = blocking(move || list(lookups, most.unwrap_or(usize::MAX), unix_ms)).await;
    Ok(match present {
        Some(present) => PastStatus {
            policy: present.policy.to_string(),
            capacity_chunks: present.capacity_chunks,
            chunk_bytes: present.chunk_bytes,
            shares,
            ..listed
        },
        None => PastStatus { shares, ..PastStatus::default() },
    })
}

fn list(
    mut lookups: Vec<PastLookup>,
    most_chunks: usize,
    unix_ms: impl Fn(&PastLookup) -> u64,
) -> PastStatus {
    lookups.sort_by_key(|lookup| std::cmp::Reverse(lookup.at));
    let mut places = HashMap::<u64, u32>::new();
    let (mut status, mut left) = (PastStatus::default(), most_chunks);
    for (number, lookup) in lookups.iter().enumerate() {
        let used = status.names.len() * CHUNK_JSON_BYTES + status.lookups.len() * LOOKUP_JSON_BYTES;
        let more = lookup.chunks.len() * CHUNK_JSON_BYTES + LOOKUP_JSON_BYTES;
        if left < lookup.chunks.len() || used + more > MOST_JSON_BYTES {
            status.left_out_lookups += (lookups.len() - number) as u64;
            break;
        }
        let Some(last) = add(&mut status, &mut places, &lookup.chunks) else {
            status.left_out_lookups += 1;
            continue;
        };
        left -= lookup.chunks.len();
        status.lookups.push(PastLookupStatus {
            unix_ms: unix_ms(lookup),
            chunk_tokens: lookup.chunk_tokens,
            prompt_tokens: lookup.prompt_tokens,
            tokens_hit: lookup.tokens_hit,
            last,
        });
    }
    status
}

/// Adds new chunks, and returns the place of the last chunk. `None`, and nothing added, if a chunk follows another chunk than in
/// a newer lookup.
fn add(status: &mut PastStatus, places: &mut HashMap<u64, u32>, chunks: &[u64]) -> Option<u32> {
    let (mut last, before) = (0, status.names.len());
    for &chunk in chunks {
        match places.entry(chunk) {
            Entry::Occupied(known) if status.parents[*known.get() as usize - 1] == last => {
                last = *known.get()
            }
            Entry::Occupied(_) => {
                status.names.drain(before..).for_each(|chunk| _ = places.remove(&chunk));
                status.parents.truncate(before);
                return None;
            }
            Entry::Vacant(vacant) => {
                status.names.push(chunk);
                status.parents.push(last);
                last = status.names.len() as u32;
                vacant.insert(last);
            }
        }
    }
    Some(last)
}

/// The argument of `/past`.
pub(super) const MOST_CHUNKS: &str = "most_chunks";

/// Maximum bytes of an answer, so that it fits into a message between servers.
const MOST_JSON_BYTES: usize = 960 << 10;

/// Maximum bytes of a name and a parent in JSON.
const CHUNK_JSON_BYTES: usize = 21 + 11;

/// Maximum bytes of a lookup in JSON, with plausible numbers.
const LOOKUP_JSON_BYTES: usize = 160;

#[cfg(test)]
mod tests {
    use larder_core::Millis;
    use larder_protocol::Fingerprint;

    use super::*;

    fn lookup(at: u64, chunks: &[u64]) -> PastLookup {
        PastLookup {
            at: Millis(at),
            namespace: Fingerprint([1; 32]),
            chunk_tokens: 16,
            prompt_tokens: chunks.len() as u64 * 16,
            tokens_hit: 16,
            chunks: chunks.into(),
        }
    }

    fn listed(lookups: Vec<PastLookup>, most_chunks: usize) -> PastStatus {
        list(lookups, most_chunks, |lookup| 1_000 + lookup.at.0)
    }

    #[test]
    fn each_chunk_is_listed_once_and_lookups_name_their_last() {
        let status =
            listed(vec![lookup(1, &[7, 8]), lookup(3, &[7, 8, 9]), lookup(2, &[7, 5]), lookup(4, &[])], 99);
        assert_eq!((&status.names[..], &status.parents[..]), (&[7, 8, 9, 5][..], &[0, 1, 2, 1][..]));
        let ends: Vec<_> = status.lookups.iter().map(|lookup| (lookup.unix_ms, lookup.last)).collect();
        assert_eq!(ends, [(1_004, 0), (1_003, 3), (1_002, 4), (1_001, 2)], "the newest first");
        assert_eq!(status.left_out_lookups, 0);
    }

    #[test]
    fn lookups_that_contradict_newer_ones_and_those_beyond_the_bound_are_left_out() {
        let lookups = vec![lookup(9, &[1, 2]), lookup(8, &[4, 3, 2]), lookup(7, &[6, 6]), lookup(6, &[1])];
        let status = listed(lookups.clone(), 99);
        assert_eq!(
            (&status.names[..], status.left_out_lookups),
            (&[1, 2][..], 2),
            "and their chunks with them"
        );
        assert_eq!(status.lookups.len(), 2);
        assert_eq!((listed(lookups, 2).lookups.len(), 2), (1, 2));
    }

    #[test]
    fn the_largest_answer_fits_a_message() {
        let many =
            (0..40_000_u64).map(|at| lookup(at, &[u64::MAX - 2 * at, u64::MAX - 2 * at - 1])).collect();
        let status = listed(many, usize::MAX);
        let json = serde_json::to_vec(&status).unwrap();
        assert!(json.len() < MOST_JSON_BYTES + 1_024, "{} bytes", json.len());
        assert!(status.lookups.len() > 4_000 && status.left_out_lookups > 30_000);
    }
}
