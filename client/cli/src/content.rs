//! The bytes of a replay's chunks, which follow from their keys alone.
//!
//! Word `i` (eight bytes, little-endian) of the chunk with hash `h` is `mix(h[i mod 4] + i * STEP)`, where `h[0..4]`
//! are the hash's four words and `mix` is one multiplication between two shifts: as fast as memory, and
//! different wherever key or offset differ.

use larder_protocol::ChunkHash;

use crate::trace::Request;

/// The name of a trace. One id stands for different prompts in different traces, so the hash of a chunk includes the trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TraceName(Option<[u8; 32]>);

impl TraceName {
    /// The generated trace of a seed.
    pub fn generated(seed: u64) -> Self {
        Self((seed > 0).then(|| *blake3::hash(&seed.to_le_bytes()).as_bytes()))
    }

    /// The trace that begins with this request.
    pub fn of(first: &Request) -> Self {
        let Request { timestamp_ms, input_tokens, output_tokens, ref block_ids } = *first;
        let mut hasher = blake3::Hasher::new();
        for number in [timestamp_ms, input_tokens, output_tokens].iter().chain(block_ids) {
            hasher.update(&number.to_le_bytes());
        }
        Self(Some(hasher.finalize().into()))
    }

    /// The hash of a block: BLAKE3 of `"larder trace"`, the trace's name and the id. To Larder it is an engine-given hash.
    pub fn chunk(&self, block_id: u64) -> ChunkHash {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"larder trace").update(self.0.as_ref().map_or(&[], |name| name));
        hasher.update(&block_id.to_le_bytes());
        ChunkHash(hasher.finalize().into())
    }
}

/// The hash of a block of the trace that is generated without a seed.
pub fn chunk_hash(block_id: u64) -> ChunkHash {
    TraceName::default().chunk(block_id)
}

/// Writes the bytes of the chunk `hash` to `out`.
pub fn fill(hash: &ChunkHash, out: &mut [u8]) {
    fill_from(&mut seeds(hash), out);
}

/// The position of the first wrong byte; `None` if all bytes are the chunk's.
pub fn first_difference(hash: &ChunkHash, bytes: &[u8]) -> Option<usize> {
    let mut seeds = seeds(hash);
    let mut expected = [0; PART_BYTES];
    for (number, part) in bytes.chunks(PART_BYTES).enumerate() {
        let expected = &mut expected[..part.len()];
        fill_from(&mut seeds, expected);
        if part != expected {
            let at = part.iter().zip(&*expected).position(|(found, expected)| found != expected);
            return at.map(|at| number * PART_BYTES + at);
        }
    }
    None
}

/// Number of bytes that differ from the chunk's.
pub fn differences(hash: &ChunkHash, bytes: &[u8]) -> usize {
    let mut seeds = seeds(hash);
    let mut expected = [0; PART_BYTES];
    let mut count = 0;
    for part in bytes.chunks(PART_BYTES) {
        fill_from(&mut seeds, &mut expected[..part.len()]);
        count += part.iter().zip(&expected).filter(|(found, expected)| found != expected).count();
    }
    count
}

/// Writes the words that follow from `seeds`, which move on. Only the last call may write less than whole groups.
fn fill_from(seeds: &mut [u64; LANES], out: &mut [u8]) {
    let (groups, rest) = out.as_chunks_mut::<GROUP_BYTES>();
    for group in groups {
        *group = next_group(seeds);
    }
    if !rest.is_empty() {
        rest.copy_from_slice(&next_group(seeds)[..rest.len()]);
    }
}

fn next_group(seeds: &mut [u64; LANES]) -> [u8; GROUP_BYTES] {
    let mut group = [0; GROUP_BYTES];
    for (word, seed) in group.as_chunks_mut::<8>().0.iter_mut().zip(seeds) {
        *word = mix(*seed).to_le_bytes();
        *seed = seed.wrapping_add(GROUP_STEP);
    }
    group
}

fn mix(seed: u64) -> u64 {
    let word = (seed ^ (seed >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    word ^ (word >> 29)
}

fn seeds(hash: &ChunkHash) -> [u64; LANES] {
    let (words, _) = hash.0.as_chunks::<8>();
    std::array::from_fn(|lane| u64::from_le_bytes(words[lane]).wrapping_add((lane as u64).wrapping_mul(STEP)))
}

/// Words that are made at a time: as many as a hash has.
const LANES: usize = 4;
const GROUP_BYTES: usize = LANES * 8;
/// The golden ratio of 2^64: successive multiples of it are far apart.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
const GROUP_STEP: u64 = STEP.wrapping_mul(LANES as u64);
/// Bytes that are compared at a time; they stay in the first-level cache.
const PART_BYTES: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(block_id: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        fill(&chunk_hash(block_id), &mut bytes);
        bytes
    }

    #[test]
    fn hashes_and_bytes_are_what_they_always_were() {
        assert_eq!(chunk_hash(7).to_string(), GOLDEN_HASH);
        assert_eq!(blake3::hash(&bytes(7, 10_000)).to_hex().as_str(), GOLDEN_CONTENT);
    }

    #[test]
    fn one_id_names_other_chunks_in_other_traces() {
        let request =
            |timestamp_ms| Request { timestamp_ms, input_tokens: 512, output_tokens: 1, block_ids: vec![0] };
        let names = [
            TraceName::generated(0),
            TraceName::generated(3),
            TraceName::of(&request(0)),
            TraceName::of(&request(1)),
        ];
        let mut hashes = names.map(|name| name.chunk(0));
        hashes.sort_unstable();
        assert!(hashes.windows(2).all(|pair| pair[0] != pair[1]));
        assert_eq!(TraceName::of(&request(1)), names[3]);
    }

    #[test]
    fn a_chunk_equals_what_its_key_implies_at_every_length() {
        let long = bytes(1, 9_000);
        for len in [0, 1, 7, 8, 31, 32, 33, 4_095, 4_096, 4_097, 8_192, 8_999] {
            assert_eq!(bytes(1, len), long[..len], "{len} bytes");
            assert_eq!(first_difference(&chunk_hash(1), &long[..len]), None, "{len} bytes");
        }
    }

    #[test]
    fn one_flipped_bit_anywhere_is_found_where_it_is() {
        let mut rng = fastrand::Rng::with_seed(1);
        let mut block = bytes(3, 10_001);
        for _ in 0..2_000 {
            let (at, bit) = (rng.usize(..block.len()), 1 << rng.u32(..8));
            block[at] ^= bit;
            assert_eq!(first_difference(&chunk_hash(3), &block), Some(at));
            assert_eq!(differences(&chunk_hash(3), &block), 1);
            block[at] ^= bit;
        }
    }

    #[test]
    fn blocks_of_other_chunks_and_shifted_ones_differ() {
        let block = bytes(3, 4_096 + 64);
        assert_eq!(first_difference(&chunk_hash(4), &block).map(|at| at < 8), Some(true));
        assert!(
            (1..64).all(|shift| first_difference(&chunk_hash(3), &block[shift..]).is_some_and(|at| at < 8))
        );
    }

    const GOLDEN_HASH: &str = "01635b08c2aa29674a86ff72a29fd9f9cf50d99bd1219cc1075bd78f6e8dfdd0";
    const GOLDEN_CONTENT: &str = "34bf515586eb81fc76a32470018ceda8a02c83b165e8101a9081bccf4754f18e";
}
