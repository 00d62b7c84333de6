//! The heap of the program: it ends the program with a sentence when no memory is left, and keeps freed memory for the next use.
#![expect(unsafe_code, reason = "an allocator is unsafe by its nature, and mallopt has no wrapper")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write as _;

/// The system's allocator. When the system refuses memory, it prints a sentence on standard error and ends the program with
/// status 1. Rust itself would abort and leave a core dump.
#[derive(Debug)]
pub struct Heap;

/// If more bytes than this are refused, the refusal goes to the caller, which may handle it (as `Vec::try_reserve` does).
const REFUSABLE_BYTES: usize = 1 << 30;

// SAFETY: every call goes to the system's allocator, or the program ends.
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

/// Ends the program. Does not allocate.
#[cold]
fn end(bytes: usize) -> ! {
    let mut text = [0_u8; 256];
    let mut rest = &mut text[..];
    let room = rest.len();
    // An error means that the text is longer than the buffer. The part that fits is printed.
    _ = writeln!(
        rest,
        "error: the system refuses {bytes} bytes of memory: lower [host] arena_bytes or another size, or raise the limit of \
         address space (ulimit -v) or of the container"
    );
    let said = room - rest.len();
    // SAFETY: the text lives longer than the call. If it cannot be written, nobody can be told.
    unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), said) };
    // SAFETY: `_exit` runs no exit handler, which might allocate.
    unsafe { libc::_exit(1) }
}

/// Keeps up to 16 MiB of freed memory a heap, from this moment on. By default the C library gives freed memory back to the system
/// from 128 KiB on. The buffers of a received block are larger, so each block would cause page faults anew.
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

/// Bytes of the heap in use, if the C library tells them.
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

/// Allocations from this size on have a mapping of their own, which ends with the allocation. Setting either bound stops the
/// library from adapting the bounds.
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
        // A thread of its own has a heap of its own, like the threads that receive blocks.
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
