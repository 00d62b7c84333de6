//! Tests of wide sums and of copies that sum.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use xxhash_rust::xxh3::Xxh3;

use super::*;
use crate::checksum::range_checksum;

/// A sum of each kind that this processor can make.
fn sums() -> Vec<(&'static str, RangeChecksum)> {
    let mut sums = vec![("plain", RangeChecksum(Sum::Plain(Xxh3::new())))];
    #[cfg(target_arch = "x86_64")]
    for (name, kernel, is_there) in [
        ("avx2", Kernel::Avx2, is_x86_feature_detected!("avx2")),
        ("avx512", Kernel::Avx512, is_x86_feature_detected!("avx512f")),
    ] {
        if is_there {
            let wide = Wide::new().expect("the processor has wide registers");
            sums.push((name, RangeChecksum(Sum::Wide(Wide { kernel, ..wide }))));
        }
    }
    sums
}

fn random() -> fastrand::Rng {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    fastrand::Rng::with_seed(seed)
}

fn random_bytes(random: &mut fastrand::Rng, bytes: usize) -> Vec<u8> {
    let mut content = vec![0; bytes];
    random.fill(&mut content);
    content
}

/// Copies with a sum, from and to these offsets of larger memory; returns the bytes that arrived, and their sum.
fn copied(sum: &RangeChecksum, content: &[u8], offsets: (usize, usize), stores: Stores) -> (Vec<u8>, u64) {
    let mut from = vec![0; offsets.0 + content.len()];
    from[offsets.0..].copy_from_slice(content);
    let mut to = vec![0xEE; offsets.1 + content.len() + 64];
    let mut sum = sum.clone();
    // SAFETY: both places are within memory of this function.
    unsafe { sum.copy(from[offsets.0..].as_ptr(), to[offsets.1..].as_mut_ptr(), content.len(), stores) };
    let end = offsets.1 + content.len();
    assert!(to[..offsets.1].iter().chain(&to[end..]).all(|&byte| byte == 0xEE), "written beside the target");
    (to[offsets.1..end].to_vec(), sum.finish())
}

#[test]
fn a_sum_of_any_length_is_xxh3() {
    let content = random_bytes(&mut random(), 5_000);
    for length in (0..2_200).chain([3_071, 3_072, 3_073, 4_095, 4_096, 4_097, 4_160, 4_161, 5_000]) {
        let content = &content[..length];
        let right = xxh3_64(content);
        assert_eq!(range_checksum(content), right, "{length} bytes");
        for (name, mut sum) in sums() {
            sum.update(content);
            assert_eq!(sum.finish(), right, "{length} bytes with {name}");
        }
    }
}

#[test]
fn a_sum_of_pieces_of_any_length_is_that_of_the_whole() {
    let mut random = random();
    for _ in 0..2_000 {
        let length = random.usize(..6_000);
        let content = random_bytes(&mut random, length);
        let bound = [1, 64, 256, 6_000][random.usize(..4)];
        let most = random.usize(1..=bound);
        for (name, mut sum) in sums() {
            let mut rest = &content[..];
            while !rest.is_empty() {
                let (now, later) = rest.split_at(random.usize(..=most.min(rest.len())));
                sum.update(now);
                rest = later;
            }
            assert_eq!(sum.finish(), xxh3_64(&content), "{length} bytes in pieces up to {most} with {name}");
        }
    }
}

#[test]
fn a_copy_of_any_length_from_and_to_any_place_arrives_whole_with_its_sum() {
    let mut random = random();
    for round in 0..6_000 {
        let length = if round < 1_500 { round } else { random.usize(..9_000) };
        let content = random_bytes(&mut random, length);
        let offsets = (random.usize(..130), random.usize(..130));
        for stores in [Stores::Cached, Stores::Streamed] {
            for (name, sum) in sums() {
                let (arrived, sum) = copied(&sum, &content, offsets, stores);
                assert!(arrived == content, "{length} bytes at {offsets:?} with {name}, {stores:?}");
                assert_eq!(sum, xxh3_64(&content), "{length} bytes at {offsets:?} with {name}, {stores:?}");
            }
        }
    }
}

#[test]
fn copies_and_bytes_that_are_added_make_one_sum() {
    let mut random = random();
    for _ in 0..500 {
        let content = random_bytes(&mut random, 20_000);
        for (name, mut sum) in sums() {
            let mut to = vec![0; content.len()];
            let mut at = 0;
            while at < content.len() {
                let now = random.usize(1..=3_000.min(content.len() - at));
                if random.bool() {
                    let stores = if random.bool() { Stores::Streamed } else { Stores::Cached };
                    // SAFETY: both places are within memory of this function.
                    unsafe { sum.copy(content[at..].as_ptr(), to[at..].as_mut_ptr(), now, stores) };
                } else {
                    sum.update(&content[at..at + now]);
                    to[at..at + now].copy_from_slice(&content[at..at + now]);
                }
                at += now;
            }
            assert!(to == content, "{name}");
            assert_eq!(sum.finish(), xxh3_64(&content), "{name}");
        }
    }
}

/// Ends the writer, even if the test fails.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Atomic bytes stand for the memory of another process, since a process may not race with itself.
#[test]
fn the_sum_is_that_of_the_copy_though_another_thread_changes_the_source_meanwhile() {
    const BYTES: usize = 256 << 10;
    let source: Vec<AtomicU8> = (0..BYTES).map(|_| AtomicU8::new(0)).collect();
    let is_over = AtomicBool::new(false);
    let mut torn = 0;
    std::thread::scope(|scope| {
        let _end = End(&is_over);
        scope.spawn(|| {
            let mut value = 0_u8;
            while !is_over.load(Ordering::Relaxed) {
                value = value.wrapping_add(1);
                source.iter().for_each(|byte| byte.store(value, Ordering::Relaxed));
            }
        });
        for round in 0..200 {
            let stores = if round % 2 == 0 { Stores::Cached } else { Stores::Streamed };
            for (name, mut sum) in sums() {
                let mut to = vec![0; BYTES];
                // SAFETY: both are within memory of this function, and nobody has a reference to the source's plain bytes.
                unsafe { sum.copy(source.as_ptr().cast(), to.as_mut_ptr(), BYTES, stores) };
                assert_eq!(sum.finish(), xxh3_64(&to), "{name}, {stores:?}");
                torn += usize::from(to.iter().any(|&byte| byte != to[0]));
            }
        }
    });
    assert!(torn > 0, "the writer changed no source while it was copied: this test showed nothing");
}
