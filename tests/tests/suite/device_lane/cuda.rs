//! The device lane over a CUDA driver, or without any driver: whole processes.

use std::process::Command;

use larder_skips::skip;

use super::*;

/// A driver of host memory, and the `larder` command that finds it.
fn larder_with_cuda(dir: &Path) -> String {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../client/device/fake/libcuda.c");
    let built = dir.join("libcuda.so");
    let flags = ["-shared", "-fPIC", "-O1", "-o"];
    assert!(Command::new("gcc").args(flags).args([&built, &source]).status().unwrap().success());
    let program = dir.join("larder");
    let hang = hang_file(dir);
    let script = format!(
        "#!/bin/sh\nLD_LIBRARY_PATH='{}' FAKE_CUDA_HANG='{}' exec '{LARDER}' \"$@\"\n",
        dir.display(),
        hang.display()
    );
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    program.to_string_lossy().into_owned()
}

#[test]
fn over_cudas_driver_an_engine_gets_its_bytes_back_from_a_node_that_was_killed_in_between() {
    let dir = tempfile::tempdir().unwrap();
    let program = larder_with_cuda(dir.path());
    let disk = "[disk]\nfolder = \"{dir}/disk\"\ncapacity_bytes = \"8MiB\"\nsegment_bytes = \"512KiB\"\n";
    let config = format!("{SMALL_HOST}{ONE_TENANT}{disk}");
    let mut node = NodeProcess::start(&program, &config).unwrap();
    let hashes = prompt(b'a', 6);
    let gpu = GpuEngine::connect(&node.socket("default"), 0);
    assert_eq!(gpu.put(&hashes), CopyEnd::Done, "{}", node.log());
    assert_eq!(gpu.get_from_arena(&hashes), 6);
    wait::until("all of it is on disk", || (node.metric("larder_disk_records") == 6.0).then_some(()));
    node.restart(|_| ()).unwrap();
    let gpu = GpuEngine::connect(&node.socket("default"), 0);
    let copy = gpu.load(&hashes, NO_FLAGS).unwrap();
    assert_eq!(gpu.end(&copy), CopyEnd::Done, "{}", node.log());
    for (position, hash) in (0..).zip(&hashes) {
        assert!(gpu.has(position, hash, 0..SHAPE.layers), "wrong bytes in the pages of chunk {position}");
    }
    assert!(node.log().contains("a GPU is opened for the device lane"));
}

/// The driver hangs while this file exists.
fn hang_file(dir: &Path) -> PathBuf {
    dir.join("hang")
}

#[test]
fn a_driver_that_hangs_keeps_no_peer_from_the_chunks_that_it_copies() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(&larder_with_cuda(dir.path()), 2).unwrap();
    let gpu = GpuEngine::connect(&cluster.socket(0), 0);
    let hashes = prompt(b'a', 4);
    assert_eq!(gpu.put(&hashes), CopyEnd::Done, "{}", cluster.node(0).log());
    std::fs::write(hang_file(dir.path()), "").unwrap();
    let copy = gpu.load(&hashes, NO_FLAGS).unwrap();
    let reader = Session::connect(cluster.socket(1), SessionOptions::default()).wait().unwrap();
    let namespace = reader.register(&layered(), &[0], &[BLOCK_BYTES as u64]).wait().unwrap();
    let chain = namespace.chain(hashes.clone());
    let options = LookupOptions { prompt_tokens: 1_000, ..LookupOptions::default() };
    wait::until("the other node finds it", || {
        let found = reader.lookup(&namespace, &chain, options.clone()).wait().unwrap();
        (found.tokens == 4 * u64::from(CHUNK_TOKENS)).then_some(())
    });
    let lease = reader.lease(&namespace, &chain).wait().unwrap();
    assert_eq!(lease.chunks(), 4, "{}", cluster.node(0).log());
    for (position, hash) in hashes.iter().enumerate() {
        let mut bytes = vec![0; BLOCK_BYTES];
        lease.copy_block(position, 0, &mut bytes).unwrap();
        assert!(bytes == block(hash), "wrong bytes under {hash}");
    }
    assert_eq!(cluster.node(0).get("/healthz").unwrap(), "ok\n");
    assert_eq!(cluster.members().len(), 2);
    assert_eq!(gpu.progress(&copy, 1, Duration::ZERO).end, None);
    std::fs::remove_file(hang_file(dir.path())).unwrap();
    assert_eq!(gpu.end(&copy), CopyEnd::Done);
    assert!(gpu.has(3, &hashes[3], 0..SHAPE.layers));
}

#[test]
fn a_node_without_a_driver_says_what_is_missing_and_serves_on() {
    if Path::new("/dev/nvidiactl").exists() {
        return skip("this machine has a driver");
    }
    let node = NodeProcess::small(LARDER).unwrap();
    let session = Session::connect(node.socket("default"), SessionOptions::default()).wait().unwrap();
    let namespace = session.register(&layered(), &[0], &[BLOCK_BYTES as u64]).wait().unwrap();
    let (layout, bytes) = layout();
    for _ in 0..2 {
        let (descriptor, _) = gpu_memory(bytes);
        let shared = vec![EngineMemory::Descriptor { descriptor, bytes }];
        let refused = session.register_tensors(&namespace, 0, &layout, shared).wait().unwrap_err();
        let SessionError::Refused(refusal) = refused else { panic!("{refused:?}") };
        assert_eq!(refusal.code, RefusalCode::Device);
        assert!(refusal.message.contains("no CUDA driver is installed"), "{}", refusal.message);
    }
    assert_eq!(node.get("/healthz").unwrap(), "ok\n");
}
