//! Hybrid models: engines save recurrent state at some boundaries. Prefixes end there, whichever node or tier they come from.

use std::time::Duration;

use larder_client::{Follow, FollowOptions, InPlace, LookupOptions, Namespace, Session, SessionOptions};
use larder_protocol::session::Wait;
use larder_protocol::{ChunkHash, HitPolicy, NamespaceSpec, PoolSet, PoolSpec};
use larder_tests::cluster::Cluster;
use larder_tests::content::{BLOCK_BYTES, CHUNK_TOKENS, block, namespace, prompt};
use larder_tests::node::{NodeProcess, ONE_TENANT, SMALL_HOST};
use larder_tests::wait;

use super::LARDER;

/// An engine of a model with attention and recurrent layers.
struct Hybrid {
    session: Session,
    namespace: Namespace,
}

impl Hybrid {
    fn connect(socket: &std::path::Path) -> Self {
        let options = SessionOptions { window_bytes: 1 << 20, ..SessionOptions::default() };
        let session = Session::connect(socket, options).wait().unwrap();
        let mut spec: NamespaceSpec = namespace();
        spec.pools.push(PoolSpec { name: "mamba".into(), hit: HitPolicy::Last, ..spec.pools[0].clone() });
        let namespace = session.register(&spec, &[0], &[BLOCK_BYTES as u64; 2]).wait().unwrap();
        Self { session, namespace }
    }

    /// Stores the missing chunks, with the state after the chunks at `states`. Returns the number of chunks.
    fn put(&self, hashes: &[ChunkHash], states: &[usize]) -> usize {
        let chain = self.namespace.chain(hashes.to_vec());
        let pools: Vec<PoolSet> =
            (0..hashes.len()).map(|at| PoolSet(if states.contains(&at) { 2 } else { 0 })).collect();
        let reservation = self.session.reserve_pools(&self.namespace, &chain, &pools, 0).wait().unwrap();
        let positions = reservation.chunks().to_vec();
        for &position in &positions {
            let mut staged = self.session.stage(&reservation, position).wait().unwrap();
            for number in staged.blocks() {
                staged.copy_from(number, 0, &content(&hashes[position as usize], number));
            }
            assert_eq!(self.session.commit(&reservation, vec![staged]).wait().unwrap(), 1);
        }
        positions.len()
    }

    /// Reads the chunks that can be restored and checks every byte. Returns the number of chunks.
    fn get(&self, hashes: &[ChunkHash]) -> usize {
        let lease =
            self.session.lease(&self.namespace, &self.namespace.chain(hashes.to_vec())).wait().unwrap();
        for (position, hash) in hashes.iter().enumerate().take(lease.chunks()) {
            assert_eq!(
                [0, 1].map(|number| lease.has_block(position, number)),
                [true, position + 1 == lease.chunks()]
            );
            for number in (0..2).filter(|&number| lease.has_block(position, number)) {
                let mut bytes = vec![0; BLOCK_BYTES];
                lease.copy_block(position, number, &mut bytes).unwrap();
                assert!(bytes == content(hash, number), "wrong bytes under {hash}");
            }
        }
        lease.chunks()
    }

    fn find(&self, hashes: &[ChunkHash]) -> u64 {
        let options = LookupOptions { prompt_tokens: 10_000, ..LookupOptions::default() };
        let chain = self.namespace.chain(hashes.to_vec());
        self.session.lookup(&self.namespace, &chain, options).wait().unwrap().tokens / u64::from(CHUNK_TOKENS)
    }
}

fn content(hash: &ChunkHash, number: usize) -> Vec<u8> {
    let mut bytes = block(hash);
    bytes.iter_mut().for_each(|byte| *byte = byte.wrapping_add(number as u8));
    bytes
}

#[test]
fn a_hybrid_prefix_ends_at_a_saved_state_in_memory_from_disk_and_after_a_restart() {
    let config = "[http]\nlisten = \"127.0.0.1:0\"\n\
                  [host]\narena_bytes = \"16MiB\"\nextent_bytes = \"2MiB\"\ncapacity_chunks = 12\npolicy = \"lru\"\n";
    let disk = "[disk]\nfolder = \"{dir}/disk\"\ncapacity_bytes = \"8MiB\"\nsegment_bytes = \"512KiB\"\n";
    let mut node = NodeProcess::start(LARDER, &format!("{config}{ONE_TENANT}{disk}")).unwrap();
    let on_disk = |node: &NodeProcess, chunks: f64| {
        let chunks_there = || node.metric("larder_cached_chunks{device=\"0\",tier=\"disk\"}");
        wait::until("chunks are on disk", || {
            (node.get("/status").is_ok() && chunks_there() >= chunks).then_some(())
        });
    };
    let engine = Hybrid::connect(&node.socket("default"));
    let (asked, other) = (prompt(b'a', 10), prompt(b'b', 12));
    assert_eq!(engine.put(&asked, &[3]), 10);
    assert_eq!((engine.find(&asked), engine.get(&asked)), (4, 4));
    assert_eq!(engine.put(&asked, &[3, 7]), 1, "another state of what is here");
    assert_eq!((engine.find(&asked), engine.get(&asked), engine.get(&asked[..7])), (8, 8, 4));
    assert_eq!(engine.put(&other, &[11]), 12);
    on_disk(&node, 22.0);
    assert_eq!((engine.get(&other), engine.get(&asked), engine.get(&other)), (12, 8, 12));
    drop(engine);
    node.restart(|_| ()).unwrap();
    on_disk(&node, 22.0);
    let engine = Hybrid::connect(&node.socket("default"));
    assert_eq!((engine.get(&asked), engine.get(&other)), (8, 12), "{}", node.log());
}

#[test]
fn a_lease_gets_the_states_that_another_node_has() {
    let cluster = Cluster::start(LARDER, 2).unwrap();
    let hashes = prompt(b'a', 10);
    assert_eq!(Hybrid::connect(&cluster.socket(0)).put(&hashes, &[2, 6]), 10);
    let reader = Hybrid::connect(&cluster.socket(1));
    wait::until("the prefix comes up to its last state", || (reader.get(&hashes) == 7).then_some(()));
}

#[test]
fn a_prefetch_brings_the_states_that_another_node_has() {
    let cluster = Cluster::start(LARDER, 2).unwrap();
    let hashes = prompt(b'a', 10);
    assert_eq!(Hybrid::connect(&cluster.socket(0)).put(&hashes, &[2, 6]), 10);
    let reader = Hybrid::connect(&cluster.socket(1));
    let chain = reader.namespace.chain(hashes);
    // Of these seven chunks six may be used, since one token is left to compute.
    let prompt_tokens = 7 * u64::from(CHUNK_TOKENS);
    let prefetch = |prompt_tokens| {
        let options = LookupOptions { prompt_tokens, ..LookupOptions::default() };
        let ticket = reader.session.prefetch(&reader.namespace, &chain, options).wait().unwrap();
        reader.session.collect(ticket, Wait::Complete).wait().unwrap().chunks()
    };
    wait::until("the prefix comes up to its first state", || (prefetch(prompt_tokens) == 3).then_some(()));
    assert_eq!(prefetch(10_000), 7);
}

#[test]
fn a_lease_gets_the_states_that_the_object_store_has_those_that_were_added_later_too() {
    let folder = tempfile::tempdir().unwrap();
    let object = format!("[object]\nurl = \"file://{}\"\n", folder.path().display());
    let config = format!("{SMALL_HOST}{ONE_TENANT}{object}");
    let writer = NodeProcess::start(LARDER, &config).unwrap();
    let written = |chunks: f64| {
        let there = || writer.metric("larder_object_orders_total{outcome=\"written\"}");
        wait::until("chunks are written", || (there() >= chunks).then_some(()));
    };
    let hashes = prompt(b'a', 10);
    let engine = Hybrid::connect(&writer.socket("default"));
    assert_eq!(engine.put(&hashes, &[2]), 10);
    written(10.0);
    assert_eq!(engine.put(&hashes, &[2, 6]), 1);
    written(11.0);
    drop(engine);
    drop(writer);
    let reader = NodeProcess::start(LARDER, &config).unwrap();
    let engine = Hybrid::connect(&reader.socket("default"));
    assert_eq!((engine.get(&hashes[..6]), engine.get(&hashes)), (3, 7), "{}", reader.log());
}

#[test]
fn a_hybrid_prompt_is_handed_over_to_another_node_and_is_a_prefix_with_its_last_state() {
    let cluster = Cluster::start(LARDER, 2).unwrap();
    let [writer, reader] = [0, 1].map(|node| Hybrid::connect(&cluster.socket(node)));
    let patience = Duration::from_secs(20);
    let options = || FollowOptions { writer: Some(("node-0".to_owned(), 0)), attempt: 0, patience };
    let follow = |hashes: &[ChunkHash]| {
        let chain = reader.namespace.chain(hashes.to_vec());
        reader.session.follow(&reader.namespace, &chain, options()).wait().unwrap()
    };
    let come = |follow: &Follow, layers: u32| {
        reader.session.wait_for_layers(follow, layers, patience).wait().unwrap()
    };
    let hashes = prompt(b'h', 3);
    let followed = follow(&hashes);
    let chain = writer.namespace.chain(hashes.clone());
    let pools = [0, 0, 2].map(PoolSet);
    let of = writer.session.reserve_attempt(&writer.namespace, &chain, &pools, 0, 1).wait().unwrap();
    assert_eq!((of.chunks(), of.pools()), (&[0, 1, 2][..], &[1, 1, 3].map(PoolSet)[..]));
    let give = |pool: usize, positions: &[u32]| {
        let layers = writer.namespace.pool_layers()[pool];
        let mut staged = writer.session.stage_layers(&of, positions, pool, 0..layers).wait().unwrap();
        for (chunk, &position) in positions.iter().enumerate() {
            staged.copy_from(chunk, 0, 0, &content(&hashes[position as usize], pool));
        }
        writer.session.hand_over(staged).wait().unwrap();
    };
    give(0, &[0, 1, 2]);
    wait::until("attention is there", || {
        let came = "larder_handed_over_layers_total{device=\"0\",how=\"came\"}";
        (cluster.node(1).metric(came) == 3.0).then_some(())
    });
    let InPlace { chunks, layers, is_whole } = followed.in_place();
    assert_eq!((chunks, layers, is_whole), (3, 0, false), "no prefix without its state");
    give(1, &[2]);
    assert!(come(&followed, 1).layers > 0);
    let lease = followed.lease().unwrap();
    for (position, hash) in hashes.iter().enumerate() {
        assert_eq!([0, 1].map(|pool| lease.has_block(position, pool)), [true, position == 2]);
        for pool in (0..2).filter(|&pool| lease.has_block(position, pool)) {
            let mut bytes = vec![0; BLOCK_BYTES];
            lease.copy_block(position, pool, &mut bytes).unwrap();
            assert!(bytes == content(hash, pool), "wrong bytes under {hash}");
        }
    }
    assert_eq!((reader.find(&hashes), writer.find(&hashes)), (0, 0), "nobody else sees it");
    assert_eq!(writer.session.commit_handed_over(&of, of.chunks()).wait().unwrap(), 3);
    wait::until("all of it is whole", || come(&followed, u32::MAX).is_whole.then_some(()));
    drop((lease, followed, of));
    assert_eq!((reader.get(&hashes), reader.get(&hashes[..2])), (3, 0));
    // A prompt that ends where no state was kept: the follower hears so at once, not after its patience.
    let shorter = prompt(b'i', 2);
    let followed = follow(&shorter);
    assert_eq!(writer.put(&shorter, &[]), 2);
    let InPlace { chunks, is_whole, .. } = come(&followed, 1);
    assert_eq!((chunks, is_whole), (0, true));
}
