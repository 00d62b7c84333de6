//! One socket a tenant: tenants share a node and nothing else.

use larder_tests::content::{BLOCK_BYTES, block, prompt};
use larder_tests::engine::EngineProcess;
use larder_tests::node::NodeProcess;
use larder_tests::raw::RawSession;

use super::{ENGINE, Engine, LARDER};

const TWO_TENANTS: &str = "\
[http]\nlisten = \"127.0.0.1:0\"\n[host]\narena_bytes = \"4MiB\"\nextent_bytes = \"2MiB\"\n\
[[tenants]]\nname = \"default\"\nsocket = \"{dir}/default.sock\"\n\
[[tenants]]\nname = \"other\"\nsocket = \"{dir}/other.sock\"\n";

#[test]
fn a_tenant_never_sees_the_blocks_of_another() {
    let node = NodeProcess::start(LARDER, TWO_TENANTS).unwrap();
    let (one, other) = (Engine::connect(&node.socket("default")), Engine::connect(&node.socket("other")));
    assert_eq!((one.session.tenant(), other.session.tenant()), ("default", "other"));
    assert_ne!(one.namespace.fingerprint(), other.namespace.fingerprint());
    one.put(&prompt(b'a', 4));
    assert_eq!((one.get(&prompt(b'a', 4)), other.get(&prompt(b'a', 4))), (4, 0));
    assert_eq!(other.put(&prompt(b'a', 4)), 4, "it writes its own");
}

#[test]
fn memory_changes_tenant_only_when_all_have_left_and_then_it_is_other_memory() {
    let node = NodeProcess::start(LARDER, TWO_TENANTS).unwrap();
    // The first tenant fills the arena and leaves; an engine of it keeps the memory mapped.
    let keeper = {
        let one = Engine::connect(&node.socket("default"));
        for name in 0..5 {
            one.put(&prompt(100 + name, 200));
        }
        one.put(&prompt(b'a', 4));
        EngineProcess::start(ENGINE, &node.socket("default"), "lease").unwrap()
    };
    let other = Engine::connect(&node.socket("other"));
    let chain = other.namespace.chain(prompt(b'b', 4));
    // This test process had the memory too, and lives on: the other tenant gets none of it.
    assert!(matches!(
        other.session.reserve(&other.namespace, &chain, 0),
        Err(larder_client::SessionError::Busy { .. })
    ));
    drop(keeper);
    node.wait_for("lingering_processes", 1);
    assert!(other.session.reserve(&other.namespace, &chain, 0).is_err());
}

#[test]
fn a_mapping_that_somebody_kept_never_shows_another_tenants_bytes() {
    let node = NodeProcess::start(LARDER, TWO_TENANTS).unwrap();
    // All that the first tenant ever stored came from processes that are gone.
    let writer = EngineProcess::start(ENGINE, &node.socket("default"), "fill").unwrap();
    writer.kill().unwrap();
    node.wait_for("sessions", 0);
    node.wait_for("lingering_processes", 0);
    let other = Engine::connect(&node.socket("other"));
    let hashes = prompt(b'b', 4);
    larder_tests::wait::until("an extent to change tenant", || {
        let chain = other.namespace.chain(hashes.clone());
        other.session.reserve(&other.namespace, &chain, 0).is_ok().then_some(())
    });
    assert_eq!(other.put(&hashes), 4);
    assert_eq!(other.get(&hashes), 4);
    let (mut raw, registered, _) = RawSession::open(&node.socket("other")).unwrap();
    let lease = raw.lease(&registered, &hashes).unwrap();
    let memory = larder_client::Mapping::read_only(
        std::os::fd::AsFd::as_fd(&lease.memory[0]),
        lease.extents[0].bytes,
    )
    .unwrap();
    // Beside the tenant's own blocks the extent is fresh: nothing of the first tenant is in it.
    let own: Vec<u64> = lease.places.iter().map(|place| place.offset).collect();
    let mut bytes = vec![0; BLOCK_BYTES];
    for slot in 0..lease.extents[0].bytes / BLOCK_BYTES as u64 {
        let offset = slot * BLOCK_BYTES as u64;
        memory.copy_to(offset, &mut bytes);
        match own.iter().position(|&place| place == offset) {
            Some(position) => assert_eq!(bytes, block(&hashes[position])),
            None => assert!(bytes.iter().all(|&byte| byte == 0), "slot {slot} holds somebody's bytes"),
        }
    }
}
