//! The content of every block: a function of its name, so that no wrong byte can hide.

use larder_node::arena::ExtentMemory;
use larder_protocol::checksum::BlockKey;
use xxhash_rust::xxh3::xxh3_64;

/// The bytes `from..to` of the block of this name. All offsets are multiples of eight.
pub(crate) fn content(key: &BlockKey, from: u64, to: u64) -> Vec<u8> {
    let (tag, mut bytes) = (tag(key), vec![0; (to - from) as usize]);
    for (word, bytes) in (from / WORD..).zip(bytes.chunks_exact_mut(WORD as usize)) {
        bytes.copy_from_slice(&word_of(tag, word).to_le_bytes());
    }
    bytes
}

/// Whether a place holds the bytes `from..to` of the block of this name.
pub(crate) fn holds(memory: &ExtentMemory, offset: u64, key: &BlockKey, from: u64, to: u64) -> bool {
    let mut found = vec![0; (to - from) as usize];
    memory.copy_out(offset, &mut found).is_ok() && found == content(key, from, to)
}

/// 64 bits that stand for a block.
fn tag(key: &BlockKey) -> u64 {
    let mut name = [0; 67];
    name[..32].copy_from_slice(&key.fingerprint.0);
    name[32..64].copy_from_slice(&key.hash.0);
    name[64..66].copy_from_slice(&key.slice.to_le_bytes());
    name[66] = key.pool;
    xxh3_64(&name)
}

fn word_of(tag: u64, word: u64) -> u64 {
    tag.wrapping_add(word.wrapping_mul(0x9e37_79b9_7f4a_7c15))
        .rotate_left(23)
        .wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

const WORD: u64 = 8;
