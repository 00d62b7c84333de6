//! Blocks that change behind a node's back: their readers find out, the node verifies and drops them, and nobody gets wrong
//! bytes.

use std::path::Path;
use std::time::Duration;

use larder_client::{
    Damaged, FollowOptions, LeaseGuard, Namespace, Session, SessionError, SessionOptions, Verify,
};
use larder_protocol::session::{Checked, RefusalCode, ReportDamage, Request, Response, Tier};
use larder_protocol::{ChunkHash, NamespaceSpec, PoolSpec};
use larder_tests::cluster::Cluster;
use larder_tests::content::{BLOCK_BYTES, block, namespace, prompt};
use larder_tests::flip::{flip_a_bit_in_every_page, replace_block};
use larder_tests::node::{NodeProcess, ONE_TENANT};
use larder_tests::raw::{RawSession, hello};
use larder_tests::{server, wait};
use tokio::runtime::Builder;

use super::devices::Node;
use super::{Engine, LARDER};

const DISK: &str = "[http]\nlisten = \"127.0.0.1:0\"\n[host]\narena_bytes = \"16MiB\"\nextent_bytes = \"2MiB\"\n\
                    [disk]\nfolder = \"{dir}/disk\"\ncapacity_bytes = \"8MiB\"\nsegment_bytes = \"512KiB\"\n";

/// An engine that verifies as `verify` says.
fn engine(socket: &Path, verify: Verify) -> Engine {
    let options = SessionOptions { window_bytes: 1 << 20, verify, ..SessionOptions::default() };
    let session = Session::connect(socket, options).wait().unwrap();
    let namespace = session.register(&namespace(), &[0], &[BLOCK_BYTES as u64]).wait().unwrap();
    Engine { session, namespace }
}

impl Engine {
    fn lease(&self, hashes: &[ChunkHash]) -> LeaseGuard {
        self.session.lease(&self.namespace, &self.namespace.chain(hashes.to_vec())).wait().unwrap()
    }
}

fn read(lease: &LeaseGuard, position: usize) -> Result<Vec<u8>, Damaged> {
    let mut bytes = vec![0; BLOCK_BYTES];
    lease.copy_block(position, 0, &mut bytes).map(|()| bytes)
}

fn reports(metric: impl Fn(&str) -> f64, by: &str, found: &str) -> f64 {
    metric(&format!("larder_damage_reports_total{{by=\"{by}\",device=\"0\",found=\"{found}\"}}"))
}

/// Of four chunks, `damage` changes the bytes of the second. Its reader is told, the node drops the chunk, and then all is right
/// again.
fn is_caught_dropped_and_right_again(node: &NodeProcess, damage: impl FnOnce(u32, &[ChunkHash])) {
    let engine = engine(&node.socket("default"), Verify::Always);
    let hashes = prompt(b'v', 4);
    assert_eq!((engine.put(&hashes), engine.get(&hashes)), (4, 4));
    damage(node.pid(), &hashes);

    let lease = engine.lease(&hashes);
    assert_eq!(lease.chunks(), 4);
    assert_eq!(read(&lease, 0).as_ref(), Ok(&block(&hashes[0])));
    assert_eq!(read(&lease, 1), Err(Damaged { position: 1, block: 0, hash: hashes[1], has_come: true }));
    assert_eq!(read(&lease, 2).as_ref(), Ok(&block(&hashes[2])));
    drop(lease);
    wait::until("the node has dropped it", || {
        (reports(|name| node.metric(name), "engine", "damaged") == 1.0).then_some(())
    });
    assert_eq!(engine.find(&hashes, 1_000), 16, "the next read is a miss: {}", node.log());
    assert_eq!(engine.get(&hashes), 1);
    assert_eq!((engine.put(&hashes), engine.get(&hashes)), (1, 4), "and then right again");
    assert_eq!(engine.session.counters().blocks_damaged, 1);
    assert_eq!(reports(|name| node.metric(name), "engine", "damaged"), 1.0);
    assert_eq!(reports(|name| node.metric(name), "engine", "right"), 0.0);
}

fn flip_second(pid: u32, hashes: &[ChunkHash]) {
    let (right, mut wrong) = (block(&hashes[1]), block(&hashes[1]));
    wrong[3_000] ^= 1;
    assert_eq!(replace_block(pid, &right, &wrong).unwrap(), 1);
}

#[test]
fn a_block_whose_bytes_are_flipped_under_the_engine_is_caught_reported_dropped_and_then_right_again() {
    is_caught_dropped_and_right_again(&NodeProcess::small(LARDER).unwrap(), flip_second);
}

#[test]
fn a_place_that_holds_another_chunks_right_bytes_is_caught_reported_dropped_and_then_right_again() {
    is_caught_dropped_and_right_again(&NodeProcess::small(LARDER).unwrap(), |pid, hashes| {
        assert_eq!(replace_block(pid, &block(&hashes[1]), &block(&hashes[2])).unwrap(), 1);
    });
}

#[test]
fn a_damaged_chunk_goes_from_the_disk_too() {
    let node = NodeProcess::start(LARDER, &format!("{DISK}{ONE_TENANT}")).unwrap();
    let on_disk = || node.metric("larder_cached_chunks{device=\"0\",tier=\"disk\"}");
    is_caught_dropped_and_right_again(&node, |pid, hashes| {
        wait::until("all are on disk", || (on_disk() == 4.0).then_some(()));
        flip_second(pid, hashes);
    });
    wait::until("it is on disk again", || (on_disk() == 4.0).then_some(()));
}

#[test]
fn without_verification_wrong_bytes_are_read_and_nobody_is_told() {
    let node = NodeProcess::small(LARDER).unwrap();
    let engine = engine(&node.socket("default"), Verify::Off);
    let hashes = prompt(b'v', 4);
    engine.put(&hashes);
    flip_second(node.pid(), &hashes);
    assert_ne!(read(&engine.lease(&hashes), 1).unwrap(), block(&hashes[1]));
    assert_eq!(engine.find(&hashes, 1_000), 64);
    assert_eq!(reports(|name| node.metric(name), "engine", "damaged"), 0.0);
}

#[test]
fn a_sample_finds_a_memory_that_damages_blocks() {
    let node = NodeProcess::small(LARDER).unwrap();
    let options = SessionOptions { window_bytes: 1 << 20, verify_seed: Some(1), ..SessionOptions::default() };
    let session = Session::connect(node.socket("default"), options).wait().unwrap();
    let namespace = session.register(&namespace(), &[0], &[BLOCK_BYTES as u64]).wait().unwrap();
    let engine = Engine { session, namespace };
    let prompts: Vec<Vec<ChunkHash>> = (0..10).map(|name| prompt(name, 100)).collect();
    prompts.iter().for_each(|hashes| assert_eq!(engine.put(hashes), 100));
    flip_a_bit_in_every_page(node.pid()).unwrap();
    let damaged: usize = prompts
        .iter()
        .map(|hashes| {
            let lease = engine.lease(hashes);
            (0..lease.chunks()).filter(|&position| read(&lease, position).is_err()).count()
        })
        .sum();
    assert!((1..60).contains(&damaged), "{damaged} of 1,000");
    wait::until("the node has dropped them", || {
        (reports(|name| node.metric(name), "engine", "damaged") == damaged as f64).then_some(())
    });
}

#[test]
fn others_hear_that_a_damaged_chunk_is_lost() {
    let cluster = Cluster::start(LARDER, 2).unwrap();
    let hashes = prompt(b'v', 4);
    let owner = engine(&cluster.socket(0), Verify::Always);
    assert_eq!(owner.put(&hashes), 4);
    let other = engine(&cluster.socket(1), Verify::Always);
    wait::until("the other node finds them", || (other.find(&hashes, 1_000) == 64).then_some(()));
    flip_second(cluster.node(0).pid(), &hashes);
    assert!(read(&owner.lease(&hashes), 1).is_err());
    wait::until("the other node finds it no more", || (other.find(&hashes, 1_000) == 16).then_some(()));
}

/// Waits until the holder, told of the damage that a reader found, has verified and dropped the chunk.
fn holder_drops(holder: impl Fn(&str) -> f64, by: &str, found: impl Fn() -> u64) {
    wait::until("the holder has dropped it", || (reports(&holder, by, "damaged") == 1.0).then_some(()));
    wait::until("nobody finds it", || (found() == 16).then_some(()));
}

#[test]
fn a_holder_is_told_of_what_came_from_it_with_a_wrong_checksum_and_drops_it() {
    let cluster = Cluster::start(LARDER, 2).unwrap();
    let hashes = prompt(b'v', 4);
    let owner = engine(&cluster.socket(0), Verify::Off);
    assert_eq!(owner.put(&hashes), 4);
    let reader = engine(&cluster.socket(1), Verify::Always);
    wait::until("the other node finds them", || (reader.find(&hashes, 1_000) == 64).then_some(()));
    flip_second(cluster.node(0).pid(), &hashes);
    assert_eq!(reader.get(&hashes), 1, "what is behind it is no prefix");
    let holder = cluster.node(0);
    holder_drops(|name| holder.metric(name), "peer", || owner.find(&hashes, 1_000));
    owner.put(&hashes);
    wait::until("and then right again", || (reader.get(&hashes) == 4).then_some(()));
}

#[test]
fn a_sibling_is_told_of_what_came_from_it_with_a_wrong_checksum_and_drops_it() {
    let node = Node::start(|_| String::new(), |_| ());
    let hashes = prompt(b'v', 4);
    let (owner, reader) = (node.engine(0), node.engine(1));
    assert_eq!(owner.put(&hashes), 4);
    flip_second(std::process::id(), &hashes);
    assert_eq!(reader.get(&hashes), 1);
    let metrics = |name: &str| server::sum(&server::get(&node.http.to_string(), "/metrics").unwrap(), name);
    holder_drops(metrics, "sibling", || {
        let chain = owner.namespace.chain(hashes.clone());
        let options = larder_client::LookupOptions {
            prompt_tokens: 1_000,
            tiers: vec![Tier::Host],
            ..larder_client::LookupOptions::default()
        };
        owner.session.lookup(&owner.namespace, &chain, options).wait().unwrap().tokens
    });
}

#[test]
fn false_reports_in_a_loop_are_told_apart_bounded_and_cost_nobody_anything() {
    let node = NodeProcess::small(LARDER).unwrap();
    let (liar, other) =
        (engine(&node.socket("default"), Verify::Off), engine(&node.socket("default"), Verify::Always));
    let hashes = prompt(b'v', 4);
    assert_eq!(other.put(&hashes), 4);
    let (mut right, mut refused) = (0, 0);
    for number in 0..2_000 {
        match liar.session.report_damage(&liar.namespace, hashes[number % 4]).wait() {
            Ok(Checked::Right) => right += 1,
            Err(SessionError::Busy { .. }) => refused += 1,
            found => panic!("{found:?}"),
        }
        if number % 100 == 0 {
            assert_eq!(other.get(&hashes), 4);
        }
    }
    // Many reports are accepted at once, and then 30 a second.
    assert!((256..1_000).contains(&right) && refused > 1_000, "{right} right, {refused} refused");
    assert_eq!(reports(|name| node.metric(name), "engine", "right"), f64::from(right));
    assert_eq!(reports(|name| node.metric(name), "engine", "not_examined"), f64::from(refused));
    assert_eq!(other.find(&hashes, 1_000), 64);
    assert_eq!(other.session.report_damage(&other.namespace, hashes[0]).wait().unwrap(), Checked::Right);
}

#[test]
fn nobody_reports_chunks_of_a_namespace_that_its_session_has_not_registered() {
    let tenants = "[[tenants]]\nname = \"a\"\nsocket = \"{dir}/a.sock\"\n[[tenants]]\nname = \"b\"\nsocket = \"{dir}/b.sock\"\n";
    let config =
        "[http]\nlisten = \"127.0.0.1:0\"\n[host]\narena_bytes = \"16MiB\"\nextent_bytes = \"2MiB\"\n";
    let node = NodeProcess::start(LARDER, &format!("{config}{tenants}")).unwrap();
    let hashes = prompt(b'v', 4);
    let victim = engine(&node.socket("a"), Verify::Always);
    assert_eq!(victim.put(&hashes), 4);
    flip_second(node.pid(), &hashes);
    let report =
        |session: &Session, namespace: &Namespace, hash| session.report_damage(namespace, hash).wait();

    // Another tenant has its own namespace under the same description, and nothing is in it.
    let other_tenant = engine(&node.socket("b"), Verify::Always);
    let found = report(&other_tenant.session, &other_tenant.namespace, hashes[1]).unwrap();
    assert_eq!(found, Checked::Nothing);
    // A namespace's number is the node's; a session may use only the numbers that it registered.
    for tenant in ["a", "b"] {
        let mut stranger = RawSession::connect(&node.socket(tenant)).unwrap();
        stranger.ask(&hello()).unwrap();
        let namespace = victim.namespace.number();
        let asked = Request::ReportDamage(ReportDamage { namespace, hash: hashes[1] });
        let Response::Refused(refusal) = stranger.ask(&asked).unwrap().0 else { panic!("it is answered") };
        assert_eq!(refusal.code, RefusalCode::Unknown, "{tenant}");
    }
    assert_eq!(victim.find(&hashes, 1_000), 64, "nothing was verified");
    assert_eq!(report(&victim.session, &victim.namespace, hashes[1]).unwrap(), Checked::Damaged);
}

#[test]
fn reports_of_chunks_that_are_being_evicted_and_demoted_harm_nobody() {
    let config = format!(
        "{}{ONE_TENANT}",
        DISK.replace("[disk]", "capacity_chunks = 8\n[disk]\nwrite = \"write_back\"")
    );
    let node = NodeProcess::start(LARDER, &config).unwrap();
    let socket = node.socket("default");
    let prompts: Vec<Vec<ChunkHash>> = (0..12).map(|name| prompt(name, 6)).collect();
    std::thread::scope(|scope| {
        let reporter = scope.spawn(|| {
            let engine = engine(&socket, Verify::Off);
            for number in 0..3_000 {
                let hash = prompts[number % 12][number / 12 % 6];
                match engine.session.report_damage(&engine.namespace, hash).wait() {
                    Ok(Checked::Right | Checked::Nothing) | Err(SessionError::Busy { .. }) => {}
                    found => panic!("{found:?}"),
                }
            }
        });
        let engine = engine(&socket, Verify::Always);
        let mut rounds = 0;
        while !reporter.is_finished() || rounds < 5 {
            for hashes in &prompts {
                engine.put(hashes);
                engine.get(hashes);
            }
            rounds += 1;
        }
        reporter.join().unwrap();
    });
    let other = engine(&socket, Verify::Always);
    prompts.iter().for_each(|hashes| _ = (other.put(hashes), other.get(hashes)));
    assert_eq!(reports(|name| node.metric(name), "engine", "damaged"), 0.0, "{}", node.log());
}

/// Bytes of a layer, and layers of a block.
const LAYER_BYTES: usize = 4_096;
const LAYERS: u32 = 4;

fn layered() -> NamespaceSpec {
    let pool = PoolSpec { layers: LAYERS, layer_bytes: LAYER_BYTES as u64, ..namespace().pools[0].clone() };
    NamespaceSpec { model: "layered".into(), pools: vec![pool], ..namespace() }
}

/// The bytes of a layer, different for each layer.
fn layer_of(hash: &ChunkHash, layer: u32) -> Vec<u8> {
    let mut named = *hash;
    named.0[31] = layer as u8 + 1;
    block(&named)
}

#[test]
fn layers_that_changed_since_they_were_handed_over_are_not_committed() {
    let node = NodeProcess::small(LARDER).unwrap();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let options = SessionOptions { window_bytes: 1 << 20, ..SessionOptions::default() };
        let session = Session::connect(node.socket("default"), options).await.unwrap();
        let bytes = [u64::from(LAYERS) * LAYER_BYTES as u64];
        let namespace = session.register(&layered(), &[0], &bytes).await.unwrap();
        let hashes = prompt(b'h', 1);
        let chain = namespace.chain(hashes.clone());
        let reservation = session.reserve(&namespace, &chain, 0).await.unwrap();
        for layer in 0..LAYERS {
            let mut staged = session.stage_layers(&reservation, &[0], 0, layer..layer + 1).await.unwrap();
            staged.copy_from(0, 0, 0, &layer_of(&hashes[0], layer));
            session.hand_over(staged).await.unwrap();
        }
        let wrong = vec![0x5a; LAYER_BYTES];
        assert_eq!(replace_block(node.pid(), &layer_of(&hashes[0], 2), &wrong).unwrap(), 1);
        assert_eq!(session.commit_handed_over(&reservation, &[0]).await.unwrap(), 0);
        assert_eq!(session.lease(&namespace, &chain).await.unwrap().chunks(), 0);
    });
}

#[test]
fn layers_that_are_followed_are_verified_as_they_come_and_the_whole_once_it_is_committed() {
    let node = NodeProcess::small(LARDER).unwrap();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let options =
            SessionOptions { window_bytes: 1 << 20, verify: Verify::Always, ..SessionOptions::default() };
        let session = Session::connect(node.socket("default"), options).await.unwrap();
        let bytes = [u64::from(LAYERS) * LAYER_BYTES as u64];
        let namespace = session.register(&layered(), &[0], &bytes).await.unwrap();
        let hashes = prompt(b'f', 2);
        let chain = namespace.chain(hashes.clone());
        let patience = Duration::from_secs(20);
        let follow = FollowOptions { writer: None, attempt: 0, patience };
        let follow = session.follow(&namespace, &chain, follow).await.unwrap();
        let reservation = session.reserve(&namespace, &chain, 0).await.unwrap();
        let wrong = vec![0x5a; LAYER_BYTES];
        for layer in 0..LAYERS {
            let mut staged = session.stage_layers(&reservation, &[0, 1], 0, layer..layer + 1).await.unwrap();
            (0..2).for_each(|chunk| staged.copy_from(chunk, 0, 0, &layer_of(&hashes[chunk], layer)));
            session.hand_over(staged).await.unwrap();
            if layer == 1 {
                // Other bytes stand in place of the second chunk's second layer.
                assert_eq!(replace_block(node.pid(), &layer_of(&hashes[1], 1), &wrong).unwrap(), 1);
            }
            session.wait_for_layers(&follow, layer + 1, patience).await.unwrap();
            let lease = follow.lease().unwrap();
            let read = |chunk: usize| {
                let mut bytes = vec![0; LAYER_BYTES];
                let offset = u64::from(layer) * LAYER_BYTES as u64;
                lease.copy_range(chunk, 0, offset, &mut bytes).map(|()| bytes)
            };
            assert_eq!(read(0).as_ref(), Ok(&layer_of(&hashes[0], layer)));
            let second = read(1);
            match layer {
                0 => assert_eq!(second.as_ref(), Ok(&layer_of(&hashes[1], 0))),
                _ => assert_eq!(
                    second,
                    Err(Damaged { position: 1, block: 0, hash: hashes[1], has_come: true })
                ),
            }
        }
        assert_eq!(session.counters().blocks_damaged, 1);
        assert_eq!(replace_block(node.pid(), &wrong, &layer_of(&hashes[1], 1)).unwrap(), 1);
        assert_eq!(session.commit_handed_over(&reservation, &[0, 1]).await.unwrap(), 2);
        let news = session.wait_for_layers(&follow, LAYERS + 1, patience).await.unwrap();
        assert!(news.is_whole);
        // Layers that were right are verified once more, with the whole block after its commit.
        let first = layer_of(&hashes[0], 3);
        assert_eq!(replace_block(node.pid(), &first, &layer_of(&hashes[1], 3)).unwrap(), 1);
        let lease = follow.lease().unwrap();
        let mut bytes = vec![0; LAYERS as usize * LAYER_BYTES];
        assert!(lease.copy_block(0, 0, &mut bytes).is_err());
    });
}
