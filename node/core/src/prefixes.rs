//! The hottest prefixes of the last lookups, as a tree of runs: chunks that follow one another and were asked for equally often.

use std::collections::{BinaryHeap, HashMap};

use larder_protocol::Fingerprint;

use crate::what_if::{PastLookup, keep_chained};

/// A run of chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HotRun {
    /// The namespace.
    pub namespace: Fingerprint,
    /// Position in the list of this run's parent, the run before it in its prompts; `None` at the beginning of a prompt.
    pub parent: Option<usize>,
    /// The first eight bytes of the first chunk's hash, as [`ChunkHash::short`](larder_protocol::ChunkHash::short) has them.
    pub first: u64,
    /// Position of the first chunk in its prompts.
    pub from: u32,
    /// Position after the last.
    pub to: u32,
    /// Tokens of all its chunks.
    pub tokens: u64,
    /// Lookups whose prompts contain the run.
    pub lookups: u64,
    /// The lookups among them that found the whole run.
    pub hits: u64,
}

#[derive(Debug, Default)]
struct Chunk {
    children: Vec<u64>,
    lookups: u64,
    hits: u64,
}

/// The runs that at least two lookups had, each after its parent, the runs with the most requested tokens first; at most `most`.
pub fn hottest(mut lookups: Vec<PastLookup>, most: usize) -> Vec<HotRun> {
    keep_chained(&mut lookups);
    let mut chunks = HashMap::<u64, Chunk>::new();
    // The first chunks of prompts, each with its namespace and the tokens of a chunk.
    let mut roots = HashMap::<u64, (Fingerprint, u32)>::new();
    for lookup in &lookups {
        let mut parent = None;
        for (position, &name) in (1_u64..).zip(lookup.chunks.iter()) {
            let is_new = !chunks.contains_key(&name);
            let chunk = chunks.entry(name).or_default();
            chunk.lookups += 1;
            chunk.hits += u64::from(position * u64::from(lookup.chunk_tokens) <= lookup.tokens_hit);
            match parent {
                Some(parent) if is_new => {
                    chunks.entry(parent).or_default().children.push(name);
                }
                None => _ = roots.insert(name, (lookup.namespace, lookup.chunk_tokens)),
                _ => {}
            }
            parent = Some(name);
        }
    }
    let mut runs = Vec::new();
    let mut next = BinaryHeap::new();
    for (name, (namespace, chunk_tokens)) in roots {
        next.extend(run(&chunks, name, (namespace, chunk_tokens), (None, 0)));
    }
    while let Some(Next { run: found, last, chunk_tokens }) = next.pop()
        && runs.len() < most
    {
        let place = runs.len();
        runs.push(found);
        for &child in &chunks[&last].children {
            next.extend(run(&chunks, child, (found.namespace, chunk_tokens), (Some(place), found.to)));
        }
    }
    runs
}

/// A run to show: the run with the most requested tokens is next.
#[derive(Debug, PartialEq, Eq)]
struct Next {
    run: HotRun,
    last: u64,
    chunk_tokens: u32,
}

impl Ord for Next {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        let rank = |next: &Self| (next.run.tokens.saturating_mul(next.run.lookups), next.last);
        rank(self).cmp(&rank(other))
    }
}

impl PartialOrd for Next {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// The run that begins with a chunk; `None` if only one lookup had it.
fn run(
    chunks: &HashMap<u64, Chunk>,
    first: u64,
    (namespace, chunk_tokens): (Fingerprint, u32),
    (parent, from): (Option<usize>, u32),
) -> Option<Next> {
    let (mut last, mut to) = (first, from + 1);
    let lookups = chunks[&first].lookups;
    if lookups < 2 {
        return None;
    }
    while let [child] = chunks[&last].children[..]
        && chunks[&child].lookups == lookups
    {
        (last, to) = (child, to + 1);
    }
    let tokens = u64::from(to - from) * u64::from(chunk_tokens);
    let hits = chunks[&last].hits;
    Some(Next {
        run: HotRun { namespace, parent, first, from, to, tokens, lookups, hits },
        last,
        chunk_tokens,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Millis;

    fn lookup(chunks: &[u64], tokens_hit: u64) -> PastLookup {
        let namespace = Fingerprint([1; 32]);
        let chunks = chunks.into();
        PastLookup { at: Millis(1), namespace, chunk_tokens: 16, prompt_tokens: 100, tokens_hit, chunks }
    }

    #[test]
    fn prompts_share_a_run_until_they_part() {
        let lookups = vec![
            lookup(&[1, 2, 3, 4], 0),
            lookup(&[1, 2, 3, 4], 64),
            lookup(&[1, 2, 5], 32),
            lookup(&[1, 2, 5], 32),
            lookup(&[1, 2, 6], 32),
            lookup(&[8], 0),
        ];
        let runs = hottest(lookups, 10);
        let told: Vec<_> = runs
            .iter()
            .map(|run| (run.first, run.from, run.to, run.parent, run.lookups, run.hits, run.tokens))
            .collect();
        let expected =
            [(1, 0, 2, None, 5, 4, 32), (3, 2, 4, Some(0), 2, 1, 32), (5, 2, 3, Some(0), 2, 0, 16)];
        assert_eq!(told, expected, "6 and 8 were asked for once");
        assert_eq!(
            hottest(vec![lookup(&[1], 0), lookup(&[1], 0), lookup(&[2], 0), lookup(&[2], 0)], 1).len(),
            1
        );
    }
}
