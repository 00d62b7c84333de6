//! The driver of `fake/libcuda.c`, built and loaded; its state is the calling thread's.
#![expect(unsafe_code, reason = "loads a library and calls it")]

use std::ffi::CString;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use libloading::Library;

/// The library, which every later search for the driver finds.
pub(super) fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let (source, built) =
            (Path::new(env!("CARGO_MANIFEST_DIR")).join("fake/libcuda.c"), folder.path().join("libcuda.so"));
        // Once the library is loaded, the search for the driver finds it by its own name (`soname`).
        let flags =
            ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcuda.so", "-o"];
        let done = Command::new("gcc").args(flags).arg(&built).arg(&source).status().unwrap();
        assert!(done.success(), "gcc did not build {}", source.display());
        // SAFETY: the library has no initializers.
        unsafe { Library::new(&built) }.unwrap()
    })
}

/// Streams go on in an order that comes from `seed`.
pub(super) fn seed(seed: u64) {
    // SAFETY: the function has this type, and changes the thread's state alone; so do the others.
    unsafe { library().get::<unsafe extern "C" fn(u64)>(b"fake_seed").unwrap()(seed) }
}

/// Stops all streams, or lets them go on.
pub(super) fn stall(is_stalled: bool) {
    // SAFETY: as in `seed`.
    unsafe { library().get::<unsafe extern "C" fn(i32)>(b"fake_stall").unwrap()(is_stalled.into()) }
}

/// Another thread captures a graph, and thereby forbids most calls to threads that did not ask otherwise.
pub(super) fn capture(is_captured: bool) {
    // SAFETY: as in `seed`.
    unsafe { library().get::<unsafe extern "C" fn(i32)>(b"fake_capture").unwrap()(is_captured.into()) }
}

/// Breaks the context after this many operations of streams.
pub(super) fn break_after(operations: i32) {
    // SAFETY: as in `seed`.
    unsafe { library().get::<unsafe extern "C" fn(i32)>(b"fake_break").unwrap()(operations) }
}

/// Makes a call fail after this many successful calls of its kind.
pub(super) fn fail(call: &str, after: i32, code: i32) {
    let call = CString::new(call).unwrap();
    // SAFETY: as in `seed`; the name ends with a zero.
    unsafe {
        let function = library().get::<unsafe extern "C" fn(*const std::ffi::c_char, i32, i32)>(b"fake_fail");
        function.unwrap()(call.as_ptr(), after, code);
    }
}

/// The number of contexts, pieces of device memory and pieces of pinned memory that are held.
pub(super) fn held() -> [i32; 3] {
    let names: [&[u8]; 3] = [b"fake_contexts", b"fake_ranges", b"fake_pinned"];
    // SAFETY: as in `seed`.
    names.map(|name| unsafe { library().get::<unsafe extern "C" fn() -> i32>(name).unwrap()() })
}

/// The handle by which another process would open an allocation.
pub(super) fn ipc_handle(address: u64) -> [u8; 64] {
    let mut handle = [0; 64];
    // SAFETY: as in `seed`; the driver writes 64 bytes.
    unsafe {
        let function =
            library().get::<unsafe extern "C" fn(*mut u8, u64) -> i32>(b"cuIpcGetMemHandle").unwrap();
        assert_eq!(function(handle.as_mut_ptr(), address), 0);
    }
    handle
}
