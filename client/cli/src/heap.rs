//! Has the C library keep freed memory for the next use.
#![cfg_attr(target_env = "gnu", expect(unsafe_code, reason = "mallopt has no wrapper"))]

/// Keeps up to 16 MiB of freed memory a heap, from this moment on. By default the C library gives freed memory back to the
/// system from 128 KiB on. The buffers of a received block are more than that, so each block would take page faults anew.
#[cfg(target_env = "gnu")]
pub(crate) fn keep_freed_memory() {
    for (option, bytes) in [(libc::M_TRIM_THRESHOLD, KEPT_BYTES), (libc::M_MMAP_THRESHOLD, MAPPED_BYTES)] {
        // SAFETY: `mallopt` takes any numbers, and may be called at any time.
        let is_set = unsafe { libc::mallopt(option, bytes) };
        if is_set == 0 {
            tracing::debug!(option, bytes, "the C library keeps freed memory as it likes");
        }
    }
}

/// Other C libraries have no such setting.
#[cfg(not(target_env = "gnu"))]
pub(crate) fn keep_freed_memory() {}

/// The bytes of two windows of a connection.
const KEPT_BYTES: i32 = 16 << 20;

/// Allocations of this size have a mapping of their own, which ends with them. Setting either bound ends the library's own search
/// for it.
const MAPPED_BYTES: i32 = 4 << 20;

#[cfg(test)]
#[cfg(target_env = "gnu")]
mod tests {
    use std::hint::black_box;

    use super::*;

    /// Page faults of the calling thread so far that needed no disk.
    fn faults() -> u64 {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let after_name = stat.rsplit_once(')').unwrap().1;
        after_name.split_whitespace().nth(7).unwrap().parse().unwrap()
    }

    #[test]
    fn buffers_of_blocks_that_come_one_after_the_other_take_no_page_faults() {
        keep_freed_memory();
        // On a thread of its own, as blocks come: it has a heap of its own.
        let thread = std::thread::spawn(|| {
            let block = || drop(black_box((0..8).map(|_| vec![1_u8; 62_300]).collect::<Vec<_>>()));
            block();
            let before = faults();
            (0..100).for_each(|_| block());
            faults() - before
        });
        let faults = thread.join().unwrap();
        assert!(faults < 100, "{faults} page faults for 100 blocks");
    }
}
