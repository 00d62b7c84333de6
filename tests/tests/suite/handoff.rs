//! Hand-overs between whole nodes: a reader follows the chunks that an engine of another node writes, layer by layer.

use std::time::Duration;

use larder_client::{
    Follow, FollowOptions, InPlace, Namespace, Reservation, Session, SessionError, SessionOptions,
};
use larder_protocol::session::Tier;
use larder_protocol::{ChunkHash, NamespaceSpec, PoolSpec};
use larder_tests::cluster::Cluster;
use larder_tests::content;
use larder_tests::wait;
use rustix::process::Signal;

use super::LARDER;

/// Layers of a chunk's block, and bytes of each. Two layers share a checksum of the commit.
const LAYERS: u32 = 6;
const LAYER_BYTES: usize = 256 << 10;

/// How long a writer may be silent.
const PATIENCE: Duration = Duration::from_secs(20);

/// An engine of a node.
struct Engine {
    session: Session,
    namespace: Namespace,
}

impl Engine {
    fn connect(cluster: &Cluster, node: usize) -> Self {
        let options = SessionOptions { window_bytes: 16 << 20, ..SessionOptions::default() };
        let session = Session::connect(cluster.socket(node), options).wait().unwrap();
        let bytes = u64::from(LAYERS) * LAYER_BYTES as u64;
        let namespace = session.register(&layered(), &[0], &[bytes]).wait().unwrap();
        Self { session, namespace }
    }

    fn reserve(&self, hashes: &[ChunkHash], attempt: u64) -> Reservation {
        let chain = self.namespace.chain(hashes.to_vec());
        self.session.reserve_attempt(&self.namespace, &chain, &[], 0, attempt).wait().unwrap()
    }

    /// Hands one layer of every chunk over.
    fn hand_over(&self, of: &Reservation, hashes: &[ChunkHash], layer: u32) -> Result<(), SessionError> {
        let positions = of.chunks().to_vec();
        let mut staged = self.session.stage_layers(of, &positions, 0, layer..layer + 1).wait()?;
        for (chunk, &position) in positions.iter().enumerate() {
            staged.copy_from(chunk, 0, 0, &layer_of(&hashes[position as usize], layer));
        }
        self.session.hand_over(staged).wait()
    }

    fn commit(&self, of: &Reservation) -> u32 {
        self.session.commit_handed_over(of, of.chunks()).wait().unwrap()
    }

    fn follow(&self, hashes: &[ChunkHash], writer: Option<usize>, attempt: u64) -> Follow {
        self.try_follow(hashes, writer, attempt, PATIENCE).unwrap()
    }

    fn try_follow(
        &self,
        hashes: &[ChunkHash],
        writer: Option<usize>,
        attempt: u64,
        patience: Duration,
    ) -> Result<Follow, SessionError> {
        let chain = self.namespace.chain(hashes.to_vec());
        let options =
            FollowOptions { writer: writer.map(|node| (format!("node-{node}"), 0)), attempt, patience };
        self.session.follow(&self.namespace, &chain, options).wait()
    }

    fn wait(&self, follow: &Follow, layers: u32) -> InPlace {
        self.session.wait_for_layers(follow, layers, PATIENCE).wait().unwrap()
    }

    /// Tokens of a prompt that can be served from these tiers.
    fn find(&self, hashes: &[ChunkHash], tiers: &[Tier]) -> u64 {
        let chain = self.namespace.chain(hashes.to_vec());
        let options = larder_client::LookupOptions {
            prompt_tokens: 10_000,
            tiers: tiers.to_vec(),
            ..larder_client::LookupOptions::default()
        };
        self.session.lookup(&self.namespace, &chain, options).wait().unwrap().tokens
    }
}

fn layered() -> NamespaceSpec {
    let pool =
        PoolSpec { layers: LAYERS, layer_bytes: LAYER_BYTES as u64, ..content::namespace().pools[0].clone() };
    NamespaceSpec { model: "layered".into(), pools: vec![pool], ..content::namespace() }
}

fn layer_of(hash: &ChunkHash, layer: u32) -> Vec<u8> {
    let mut named = *hash;
    named.0[31] = layer as u8 + 1;
    let mut bytes = vec![0; LAYER_BYTES];
    larder_cli::content::fill(&named, &mut bytes);
    bytes
}

/// Reads a layer of every followed chunk, and checks every byte.
fn assert_layer(follow: &Follow, hashes: &[ChunkHash], layer: u32) {
    let lease = follow.lease().expect("its places are told with the first layer");
    for (position, hash) in hashes.iter().enumerate() {
        let mut bytes = vec![0; LAYER_BYTES];
        lease.copy_range(position, 0, u64::from(layer) * LAYER_BYTES as u64, &mut bytes).unwrap();
        assert!(bytes == layer_of(hash, layer), "wrong bytes in layer {layer} of {hash}");
    }
}

/// Checks that a node no longer holds anything for the follow.
fn nothing_is_held(cluster: &Cluster, node: usize) {
    let metric = |name: &str| cluster.node(node).metric(name);
    wait::until("nothing is held", || {
        let held = ["follows", "fetches", "grants", "leases", "reservations"]
            .map(|what| metric(&format!("larder_held{{device=\"0\",what=\"{what}\"}}")));
        let quarantined = metric("larder_arena_bytes{device=\"0\",state=\"quarantined\"}");
        let used = metric("larder_arena_bytes{device=\"0\",state=\"used\"}");
        let cached = metric("larder_cached_bytes{device=\"0\",tier=\"host\"}");
        (held.iter().all(|&count| count == 0.0) && quarantined == 0.0 && used == cached).then_some(())
    });
}

#[test]
fn layers_come_from_another_node_as_they_are_handed_over_and_the_chunk_at_the_commit() {
    let cluster = Cluster::start(LARDER, 2).unwrap();
    let (writer, reader) = (Engine::connect(&cluster, 0), Engine::connect(&cluster, 1));
    let hashes = content::prompt(b'h', 2);
    let follow = reader.follow(&hashes, Some(0), 0);
    let of = writer.reserve(&hashes, 0);
    for (in_place, layer) in (1..).zip(0..LAYERS) {
        writer.hand_over(&of, &hashes, layer).unwrap();
        let came = reader.wait(&follow, in_place);
        assert_eq!((came.chunks, came.layers, came.is_whole), (2, in_place, false));
        assert_layer(&follow, &hashes, layer);
        for engine in [&writer, &reader] {
            assert_eq!(engine.find(&hashes, &[]), 0, "nobody else sees what is not committed");
        }
    }
    assert_eq!(writer.commit(&of), 2);
    wait::until("all of it is whole", || {
        (reader.find(&hashes, &[Tier::Host]) == 2 * u64::from(content::CHUNK_TOKENS)).then_some(())
    });
    assert_eq!(
        writer.find(&hashes, &[Tier::Host]),
        2 * u64::from(content::CHUNK_TOKENS),
        "the writer keeps its own"
    );
    drop((follow, of));
    let count = |node: usize, how: &str| {
        let (layers, bytes) = ("larder_handed_over_layers_total", "larder_handed_over_bytes_total");
        let label = format!("{{device=\"0\",how=\"{how}\"}}");
        [layers, bytes].map(|name| cluster.node(node).metric(&format!("{name}{label}")))
    };
    let all = [2.0 * f64::from(LAYERS), 2.0 * f64::from(LAYERS) * LAYER_BYTES as f64];
    assert_eq!([count(0, "given"), count(0, "sent"), count(1, "came")], [all; 3]);
    (0..2).for_each(|node| nothing_is_held(&cluster, node));
}

#[test]
fn layers_that_come_out_of_order_are_read_in_order() {
    let cluster = Cluster::start(LARDER, 2).unwrap();
    let (writer, reader) = (Engine::connect(&cluster, 0), Engine::connect(&cluster, 1));
    let hashes = content::prompt(b'o', 2);
    let of = writer.reserve(&hashes, 0);
    [5, 1, 2].iter().for_each(|&layer| writer.hand_over(&of, &hashes, layer).unwrap());
    // Layers that were handed over before somebody followed come too.
    let follow = reader.follow(&hashes, Some(0), 0);
    writer.hand_over(&of, &hashes, 0).unwrap();
    assert_eq!(reader.wait(&follow, 3).layers, 3);
    (0..3).for_each(|layer| assert_layer(&follow, &hashes, layer));
    [4, 3].iter().for_each(|&layer| writer.hand_over(&of, &hashes, layer).unwrap());
    assert_eq!(reader.wait(&follow, LAYERS).layers, LAYERS);
    (3..LAYERS).for_each(|layer| assert_layer(&follow, &hashes, layer));
    writer.commit(&of);
    wait::until("all of it is whole", || reader.wait(&follow, LAYERS + 1).is_whole.then_some(()));
    drop((follow, of));
    (0..2).for_each(|node| nothing_is_held(&cluster, node));
}

#[test]
fn an_engine_of_the_same_node_follows_in_place() {
    let cluster = Cluster::start(LARDER, 1).unwrap();
    let (writer, reader) = (Engine::connect(&cluster, 0), Engine::connect(&cluster, 0));
    let hashes = content::prompt(b's', 2);
    let follow = reader.follow(&hashes, Some(0), 0);
    let of = writer.reserve(&hashes, 0);
    for layer in 0..LAYERS {
        writer.hand_over(&of, &hashes, layer).unwrap();
        assert_eq!(reader.wait(&follow, layer + 1).layers, layer + 1);
        assert_layer(&follow, &hashes, layer);
    }
    writer.commit(&of);
    wait::until("all of it is whole", || reader.wait(&follow, LAYERS + 1).is_whole.then_some(()));
    drop((follow, of));
    nothing_is_held(&cluster, 0);
}

#[test]
fn a_writer_that_ends_after_any_layer_ends_its_followers_and_nothing_leaks() {
    let cluster = Cluster::start(LARDER, 2).unwrap();
    let reader = Engine::connect(&cluster, 1);
    for layers in 0..=LAYERS {
        for by_abort in [true, false] {
            let writer = Engine::connect(&cluster, 0);
            let hashes = content::prompt(b'A' + 2 * layers as u8 + u8::from(by_abort), 2);
            let follow = reader.follow(&hashes, Some(0), 0);
            let of = writer.reserve(&hashes, 0);
            (0..layers).for_each(|layer| writer.hand_over(&of, &hashes, layer).unwrap());
            if layers > 0 {
                reader.wait(&follow, layers);
            }
            wait::until("the writer's node is followed", || {
                (cluster.node(0).metric("larder_held{device=\"0\",what=\"follows\"}") == 1.0).then_some(())
            });
            if by_abort {
                of.abort()
            } else {
                drop((writer, of))
            }
            let ended = wait::until("the follower hears of it", || {
                let told = reader.wait(&follow, LAYERS + 1);
                (told.chunks == 0).then_some(told)
            });
            assert!(ended.is_whole, "nothing more will come");
        }
    }
    (0..2).for_each(|node| nothing_is_held(&cluster, node));
    assert_eq!(cluster.node(1).metric("larder_follows_lost_chunks_total"), f64::from(4 * (LAYERS + 1)));
}

#[test]
fn a_follower_hears_that_the_writers_node_was_killed() {
    let mut cluster = Cluster::start(LARDER, 2).unwrap();
    let (writer, reader) = (Engine::connect(&cluster, 0), Engine::connect(&cluster, 1));
    let hashes = content::prompt(b'k', 2);
    let follow = reader.follow(&hashes, Some(0), 0);
    let of = writer.reserve(&hashes, 0);
    (0..2).for_each(|layer| writer.hand_over(&of, &hashes, layer).unwrap());
    assert_eq!(reader.wait(&follow, 2).layers, 2);
    cluster.restart_node(0).unwrap();
    let ended = wait::until("the follower hears of it", || {
        let told = reader.wait(&follow, LAYERS);
        (told.chunks == 0).then_some(told)
    });
    assert!(ended.is_whole);
    // The layers that the follower has seen stay as they are as long as it may read them.
    (0..2).for_each(|layer| assert_layer(&follow, &hashes, layer));
    drop((follow, of, writer));
    nothing_is_held(&cluster, 1);
}

#[test]
fn a_silent_writer_is_waited_for_as_long_as_the_reader_says() {
    let cluster = Cluster::start(LARDER, 2).unwrap();
    let (writer, reader) = (Engine::connect(&cluster, 0), Engine::connect(&cluster, 1));
    let hashes = content::prompt(b'p', 2);
    let follow = reader.try_follow(&hashes, Some(0), 0, Duration::from_millis(300)).unwrap();
    let of = writer.reserve(&hashes, 0);
    writer.hand_over(&of, &hashes, 0).unwrap();
    let told = wait::until("the follower gives up", || {
        let told = reader.wait(&follow, LAYERS);
        (told.chunks == 0).then_some(told)
    });
    assert!(told.is_whole);
    drop(follow);
    nothing_is_held(&cluster, 1);
    (1..LAYERS).for_each(|layer| writer.hand_over(&of, &hashes, layer).unwrap());
    assert_eq!(writer.commit(&of), 2, "the writer is none the worse");
    drop(of);
    nothing_is_held(&cluster, 0);
}

#[test]
fn a_stopped_node_is_not_waited_for() {
    let cluster = Cluster::start(LARDER, 2).unwrap();
    let (writer, reader) = (Engine::connect(&cluster, 0), Engine::connect(&cluster, 1));
    let hashes = content::prompt(b't', 2);
    let follow = reader.follow(&hashes, Some(0), 0);
    let of = writer.reserve(&hashes, 0);
    writer.hand_over(&of, &hashes, 0).unwrap();
    assert_eq!(reader.wait(&follow, 1).layers, 1);
    cluster.node(0).signal(Signal::STOP).unwrap();
    wait::until("the follower hears of it", || (reader.wait(&follow, LAYERS).chunks == 0).then_some(()));
    cluster.node(0).signal(Signal::CONT).unwrap();
    drop((follow, of));
    (0..2).for_each(|node| nothing_is_held(&cluster, node));
}

#[test]
fn a_reader_that_goes_away_leaves_nothing_behind() {
    let cluster = Cluster::start(LARDER, 2).unwrap();
    let writer = Engine::connect(&cluster, 0);
    let hashes = content::prompt(b'g', 2);
    let of = writer.reserve(&hashes, 0);
    {
        let reader = Engine::connect(&cluster, 1);
        let follow = reader.follow(&hashes, Some(0), 0);
        writer.hand_over(&of, &hashes, 0).unwrap();
        assert_eq!(reader.wait(&follow, 1).layers, 1);
    }
    wait::until("the writer's node hears of it", || {
        (cluster.node(0).metric("larder_held{device=\"0\",what=\"follows\"}") == 0.0).then_some(())
    });
    (1..LAYERS).for_each(|layer| writer.hand_over(&of, &hashes, layer).unwrap());
    assert_eq!(writer.commit(&of), 2);
    drop(of);
    nothing_is_held(&cluster, 0);
}

#[test]
fn a_late_writer_of_an_earlier_attempt_is_refused() {
    let cluster = Cluster::start(LARDER, 2).unwrap();
    let (first, second) = (Engine::connect(&cluster, 0), Engine::connect(&cluster, 0));
    let reader = Engine::connect(&cluster, 1);
    let hashes = content::prompt(b'l', 2);
    let stalled = first.reserve(&hashes, 1);
    first.hand_over(&stalled, &hashes, 0).unwrap();
    let follow = reader.follow(&hashes, Some(0), 2);
    let of = second.reserve(&hashes, 2);
    assert_eq!(of.chunks(), [0, 1]);
    let late = first.hand_over(&stalled, &hashes, 1);
    assert!(matches!(late, Err(SessionError::Refused(_))), "{late:?}");
    (0..LAYERS).for_each(|layer| second.hand_over(&of, &hashes, layer).unwrap());
    assert_eq!(reader.wait(&follow, LAYERS).layers, LAYERS);
    (0..LAYERS).for_each(|layer| assert_layer(&follow, &hashes, layer));
    second.commit(&of);
    wait::until("all of it is whole", || reader.wait(&follow, LAYERS + 1).is_whole.then_some(()));
    drop((follow, of, stalled));
    (0..2).for_each(|node| nothing_is_held(&cluster, node));
}

#[test]
fn several_readers_on_several_nodes_follow_one_writer_and_one_reader_several_writers() {
    let cluster = Cluster::start(LARDER, 3).unwrap();
    let writers = [Engine::connect(&cluster, 0), Engine::connect(&cluster, 1)];
    let readers = [Engine::connect(&cluster, 1), Engine::connect(&cluster, 2), Engine::connect(&cluster, 2)];
    let prompts = [content::prompt(b'v', 1), content::prompt(b'w', 1)];
    let follows: Vec<(usize, usize, Follow)> = (0..readers.len())
        .flat_map(|reader| (0..writers.len()).map(move |writer| (reader, writer)))
        .map(|(reader, writer)| (reader, writer, readers[reader].follow(&prompts[writer], Some(writer), 0)))
        .collect();
    let reserved: Vec<Reservation> =
        writers.iter().zip(&prompts).map(|(writer, prompt)| writer.reserve(prompt, 0)).collect();
    for layer in 0..LAYERS {
        for ((writer, of), prompt) in writers.iter().zip(&reserved).zip(&prompts) {
            writer.hand_over(of, prompt, layer).unwrap();
        }
        for (reader, writer, follow) in &follows {
            assert_eq!(readers[*reader].wait(follow, layer + 1).layers, layer + 1);
            assert_layer(follow, &prompts[*writer], layer);
        }
    }
    writers.iter().zip(&reserved).for_each(|(writer, of)| assert_eq!(writer.commit(of), 1));
    for (reader, _, follow) in &follows {
        wait::until("all of it is whole", || {
            readers[*reader].wait(follow, LAYERS + 1).is_whole.then_some(())
        });
    }
    // The node with two readers received each layer once.
    let came = "larder_handed_over_layers_total{device=\"0\",how=\"came\"}";
    assert_eq!(cluster.node(2).metric(came), 2.0 * f64::from(LAYERS));
    drop((follows, reserved));
    (0..3).for_each(|node| nothing_is_held(&cluster, node));
}
