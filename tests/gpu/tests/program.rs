//! The program itself: over a driver of host memory, over a driver that is too old, and without a driver.
#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::path::Path;
use std::process::{Command, Output};

/// Runs the program with a driver built from `fake/libcuda.c` with these flags.
fn run(flags: &[&str]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../client/device/fake/libcuda.c");
    let built = folder.path().join("libcuda.so");
    let status = Command::new("gcc")
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .args([&built, &source])
        .args(flags)
        .status()
        .unwrap();
    assert!(status.success());
    Command::new(env!("CARGO_BIN_EXE_larder-gpu"))
        .args(["--small", "--json"])
        .env("LD_LIBRARY_PATH", folder.path())
        .output()
        .unwrap()
}

fn report(output: &Output) -> serde_json::Value {
    let stderr = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {stderr}"))
}

#[test]
fn over_a_driver_of_host_memory_every_copy_is_right_and_everything_is_measured() {
    let output = run(&[]);
    let report = report(&output);
    assert!(output.status.success(), "{report:#}");
    assert_eq!(report["device"], "fake GPU");
    let checks = report["checks"].as_array().unwrap();
    assert_eq!(checks.len(), 61);
    assert!(checks.iter().all(|check| check["wrong"].is_null()), "{checks:#?}");
    assert!(report["measures"].as_array().unwrap().len() > 50);
}

#[test]
fn a_kernel_that_forgets_the_last_bytes_of_a_page_is_found() {
    let output = run(&["-DFAKE_FORGOTTEN_UNITS=1"]);
    assert_eq!(output.status.code(), Some(1));
    let wrong =
        report(&output)["checks"].as_array().unwrap().iter().filter(|c| !c["wrong"].is_null()).count();
    assert!(wrong > 0);
}

#[test]
fn a_driver_that_is_too_old_is_named_and_passes() {
    let output = run(&["-DcuStreamWriteValue32_v2=cuStreamWriteValue32_of_old"]);
    assert!(output.status.success());
    let skipped = report(&output)["skipped"].as_str().unwrap().to_owned();
    assert!(skipped.contains("it has no cuStreamWriteValue32_v2"), "{skipped}");
}

#[test]
fn a_machine_without_a_gpu_is_told_so_and_passes() {
    let output = Command::new(env!("CARGO_BIN_EXE_larder-gpu")).args(["--small"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    if Path::new("/dev/nvidiactl").exists() {
        return larder_skips::skip("this machine has a driver");
    }
    assert!(text.starts_with("nothing to check here: no CUDA driver is installed"), "{text}");
}
