//! One socket for each tenant: tenants share a node and nothing else.

use std::fs::File;
use std::os::unix::fs::FileExt;

use larder_client::SessionError;
use larder_protocol::ChunkHash;
use larder_protocol::session::Response;
use larder_tests::content::prompt;
use larder_tests::engine::{EngineProcess, heir_file};
use larder_tests::node::{NodeProcess, ONE_TENANT, SMALL_HOST};
use larder_tests::raw::{RawSession, hello};
use larder_tests::server::signal;
use larder_tests::wait;
use rustix::process::{Pid, Signal, kill_process};

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
    // The first tenant fills the arena and leaves, but one of its engines keeps the memory mapped.
    let keeper = {
        let one = Engine::connect(&node.socket("default"));
        for name in 0..4 {
            one.put(&prompt(100 + name, 200));
            assert_eq!(one.get(&prompt(100 + name, 200)), 200);
        }
        one.put(&prompt(b'a', 4));
        EngineProcess::start(ENGINE, &node.socket("default"), "lease").unwrap()
    };
    let other = Engine::connect(&node.socket("other"));
    let chain = other.namespace.chain(prompt(b'b', 4));
    // This test process had the memory mapped too, and lives on: the other tenant gets none of it.
    assert!(matches!(
        other.session.reserve(&other.namespace, &chain, 0).wait(),
        Err(SessionError::Busy { .. })
    ));
    drop(keeper);
    node.wait_for("lingering_processes", 1);
    assert!(other.session.reserve(&other.namespace, &chain, 0).wait().is_err());
}

#[test]
fn memory_that_somebody_kept_never_shows_another_tenants_bytes() {
    let node = NodeProcess::start(LARDER, TWO_TENANTS).unwrap();
    let socket = node.socket("default");
    // All chunks of the first tenant came from processes that ended, but one process left its memory to a child.
    EngineProcess::start(ENGINE, &socket, "fill").unwrap().kill().unwrap();
    EngineProcess::start(ENGINE, &socket, "bequeath").unwrap().kill().unwrap();
    let heir = std::fs::read_to_string(heir_file(&socket)).unwrap();
    let kept = File::open(format!("/proc/{heir}/fd/0")).unwrap();
    let before = read_all(&kept);
    assert!(before.iter().any(|&byte| byte != 0));
    node.wait_for("lingering_processes", 0);

    let other = Engine::connect(&node.socket("other"));
    let hashes: Vec<Vec<ChunkHash>> = (0..8).map(|name| prompt(200 + name, 100)).collect();
    for hashes in &hashes {
        wait::until("an extent to change tenant", || {
            let chain = other.namespace.chain(hashes.clone());
            other.session.reserve(&other.namespace, &chain, 0).wait().is_ok().then_some(())
        });
        other.put(hashes);
        assert_eq!(other.get(hashes), 100);
    }
    assert!(node.status("evictions") >= 512, "the extent that the child keeps changed tenant too");
    assert!(read_all(&kept) == before, "what the child kept is what it was");
    kill(&heir);
}

#[test]
fn a_tenant_whose_socket_is_made_again_has_no_more_sessions_than_before() {
    let config = format!("[session]\nmax_sessions = 1\n{SMALL_HOST}{ONE_TENANT}");
    let node = NodeProcess::start(LARDER, &config).unwrap();
    let socket = node.socket("default");
    let _engine = Engine::connect(&socket);
    std::fs::remove_file(&socket).unwrap();
    signal(node.pid(), Signal::HUP).unwrap();
    let again = "the tenant's socket was gone, and is made again";
    wait::until("the socket is made again", || node.log().contains(again).then_some(()));
    let refused = RawSession::connect(&socket).unwrap().ask(&hello()).unwrap().0;
    assert!(matches!(refused, Response::Busy(_)), "{refused:?}");
}

fn read_all(memory: &File) -> Vec<u8> {
    let mut bytes = vec![0; 2 << 20];
    memory.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

fn kill(pid: &str) {
    let pid = Pid::from_raw(pid.parse().unwrap()).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
}
