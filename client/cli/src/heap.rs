//! The heap of the program: it ends the program with a sentence when no memory is left, and keeps freed memory for the next use.
#![expect(unsafe_code, reason = "an allocator is unsafe by its nature, and mallopt has no wrapper")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write as _;

/// The system's allocator. When the system refuses memory, it prints a sentence on standard error and ends the program with
/// status 1. Rust itself would abort and leave a core dump.
#[derive(Debug)]
pub struct Heap;

/// The caller of a larger allocation gets the refusal itself, since it may handle it (as `Vec::try_reserve` does).
const REFUSABLE_BYTES: usize = 1 << 30;

// SAFETY: all is the system allocator's, or the program ends.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps to the rules of `GlobalAlloc::alloc`.
        given(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps to the rules of `GlobalAlloc::alloc_zeroed`.
        given(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: the caller keeps to the rules of `GlobalAlloc::realloc`.
        given(unsafe { System.realloc(memory, layout, bytes) }, bytes)
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps to the rules of `GlobalAlloc::dealloc`.
        unsafe { System.dealloc(memory, layout) }
    }
}

fn given(memory: *mut u8, bytes: usize) -> *mut u8 {
    if memory.is_null() && bytes <= REFUSABLE_BYTES {
        end(bytes)
    }
    memory
}

/// Ends the program. No step of it allocates.
#[cold]
fn end(bytes: usize) -> ! {
    let mut text = [0_u8; 256];
    let mut rest = &mut text[..];
    let room = rest.len();
    // An error: the text is longer than its place, and what has room of it is said.
    _ = writeln!(
        rest,
        "error: the system refuses {bytes} bytes of memory: lower [host] arena_bytes or another size, or raise the limit of \
         address space (ulimit -v) or of the container"
    );
    let said = room - rest.len();
    // SAFETY: the text is there for the call. Where it cannot be written, nobody can be told.
    unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), said) };
    // SAFETY: no handler of the process's end runs, which might allocate.
    unsafe { libc::_exit(1) }
}

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

/// Bytes of the heap that are in use, where the C library tells.
#[cfg(target_env = "gnu")]
pub(crate) fn used_bytes() -> Option<usize> {
    // SAFETY: `mallinfo2` only reads the library's own counts, and may be called at any time.
    let counts = unsafe { libc::mallinfo2() };
    Some(counts.uordblks + counts.hblkhd)
}

/// Other C libraries do not tell.
#[cfg(not(target_env = "gnu"))]
pub(crate) fn used_bytes() -> Option<usize> {
    None
}

/// The bytes of two windows of a connection.
const KEPT_BYTES: i32 = 16 << 20;

/// Each allocation of this size has its own mapping, which ends with the allocation. Setting either bound ends the library's own
/// search for it.
const MAPPED_BYTES: i32 = 4 << 20;

#[cfg(test)]
#[cfg(target_env = "gnu")]
mod tests {
    use std::hint::black_box;

    use super::*;

    /// Page faults of the calling thread so far, without disk reads.
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
