//! An engine with memory on a device; its own process copies between this memory and the node's arena.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use larder_client::engine_lane::{CopyFlags, EngineTensors, LaneError, LoadPages, SavePages};
use larder_client::{EngineLane, FollowOptions, Session, SessionOptions};
use larder_device::host::{Fault, HostControl, HostDevice};
use larder_device::{CopyError, Device, EngineMemory, HostMemory};
use larder_protocol::ChunkHash;
use larder_tests::content::{BLOCK_BYTES, block, prompt};
use larder_tests::node::NodeProcess;
use larder_tests::wait::until;

use super::gpu_pages::{GpuPages, LONG, SHAPE, layered, layout};
use super::{Engine, LARDER};

/// An engine whose pages are on a device.
struct GpuEngine {
    engine: Engine,
    lane: EngineLane,
    tensors: EngineTensors,
    pages: GpuPages,
    control: HostControl,
}

impl Deref for GpuEngine {
    type Target = GpuPages;

    fn deref(&self) -> &GpuPages {
        &self.pages
    }
}

impl GpuEngine {
    fn connect(node: &NodeProcess) -> Self {
        let engine = Engine::connect(&node.socket("default"));
        let (layout, bytes) = layout();
        assert_eq!(layout.block_bytes(), BLOCK_BYTES as u64);
        let control = HostControl::default();
        let (of_device, seed) = (control.clone(), fastrand::u64(..));
        println!("seed {seed}");
        let open = move || Ok(Box::new(HostDevice::new(seed, of_device)) as Box<dyn Device>);
        let lane = EngineLane::start(4, open).unwrap();
        let memory = HostMemory::allocate(bytes).unwrap();
        control.share(memory.clone());
        let own = EngineMemory::Own { address: 0, bytes };
        let tensors = lane.register(layout, vec![own]).unwrap();
        Self { engine, lane, tensors, pages: GpuPages(memory), control }
    }

    /// Saves the chunks that are missing.
    fn put(&self, hashes: &[ChunkHash]) -> Result<usize, CopyError> {
        let Engine { session, namespace } = &self.engine;
        let reservation = session.reserve(namespace, &namespace.chain(hashes.to_vec()), 0).wait().unwrap();
        for &position in reservation.chunks() {
            self.compute(position, &hashes[position as usize]);
            let staged = session.stage(&reservation, position).wait().unwrap();
            let save = SavePages { block: 0, pages: GpuPages::of(position), layers: 0..SHAPE.layers };
            let copy = self.lane.save(&self.tensors, staged, &save, CopyFlags::default()).unwrap();
            let staged = copy.wait(LONG).expect("the copy ends")?;
            assert_eq!(session.commit(&reservation, vec![staged]).wait().unwrap(), 1);
        }
        Ok(reservation.chunks().len())
    }

    fn lease(&self, hashes: &[ChunkHash]) -> Arc<larder_client::LeaseGuard> {
        let Engine { session, namespace } = &self.engine;
        Arc::new(session.lease(namespace, &namespace.chain(hashes.to_vec())).wait().unwrap())
    }
}

#[test]
fn what_a_gpu_engine_puts_a_cpu_engine_gets_and_the_other_way_round() {
    let node = NodeProcess::small(LARDER).unwrap();
    let (gpu, cpu) = (GpuEngine::connect(&node), Engine::connect(&node.socket("default")));
    assert_eq!(gpu.put(&prompt(b'a', 6)), Ok(6));
    assert_eq!(cpu.get(&prompt(b'a', 6)), 6);
    let hashes = prompt(b'b', 6);
    cpu.put(&hashes);
    let lease = gpu.lease(&hashes);
    assert_eq!(lease.chunks(), 6);
    let flags = CopyFlags { after: None, then: Some((3, 0)) };
    let copy = gpu.lane.load(&gpu.tensors, &lease, &GpuPages::load(6), flags).unwrap();
    assert_eq!(copy.wait(LONG), Some(Ok(())));
    for (position, hash) in (0..).zip(&hashes) {
        assert!(gpu.has(position, hash, 0..SHAPE.layers), "wrong bytes in the pages of chunk {position}");
    }
    assert_eq!(gpu.lane.flags().word(12), SHAPE.layers, "the engine's stream would go on");
}

#[test]
fn a_save_that_fails_commits_nothing_and_gives_its_room_back() {
    let node = NodeProcess::small(LARDER).unwrap();
    let gpu = GpuEngine::connect(&node);
    let hashes = prompt(b'a', 3);
    // Far more chunks than the window has room for at a time.
    for after in 0..400 {
        gpu.control.fail_next(Fault::Fail { after: after % 8 });
        assert_eq!(gpu.put(&hashes), Err(CopyError::Failed));
    }
    assert_eq!(gpu.engine.get(&hashes), 0);
    assert_eq!(gpu.put(&hashes), Ok(3));
    assert_eq!(gpu.engine.get(&hashes), 3);
}

#[test]
fn layers_that_a_gpu_engine_hands_over_are_read_while_others_are_computed() {
    let node = NodeProcess::small(LARDER).unwrap();
    let mut gpu = GpuEngine::connect(&node);
    gpu.engine.namespace =
        gpu.engine.session.register(&layered(), &[0], &[BLOCK_BYTES as u64]).wait().unwrap();
    let reader = Session::connect(node.socket("default"), SessionOptions::default()).wait().unwrap();
    let namespace = reader.register(&layered(), &[0], &[BLOCK_BYTES as u64]).wait().unwrap();
    let hashes = prompt(b'a', 3);
    let options = FollowOptions { writer: None, attempt: 0, patience: LONG };
    let follow = reader.follow(&namespace, &namespace.chain(hashes.clone()), options).wait().unwrap();
    let own = &gpu.engine.namespace;
    let reservation = gpu.engine.session.reserve(own, &own.chain(hashes.clone()), 0).wait().unwrap();
    let pages: Vec<u32> = (0..3).flat_map(GpuPages::of).collect();
    for layers in [0..1, 1..3, 3..4] {
        (0..).zip(&hashes).for_each(|(position, hash)| gpu.compute(position, hash));
        let staged =
            gpu.engine.session.stage_layers(&reservation, &[0, 1, 2], 0, layers.clone()).wait().unwrap();
        let part = gpu.lane.part(&gpu.tensors, &layers).unwrap();
        let copy = gpu.lane.save_layers(&part, staged, &pages, CopyFlags::default()).unwrap();
        gpu.engine.session.hand_over(copy.wait(LONG).unwrap().unwrap()).wait().unwrap();
        let here = reader.wait_for_layers(&follow, layers.end, LONG).wait().unwrap();
        assert_eq!((here.chunks, here.layers), (3, layers.end));
        let (lease, layer_bytes) = (follow.lease().unwrap(), BLOCK_BYTES / SHAPE.layers as usize);
        for (position, hash) in hashes.iter().enumerate() {
            let mut read = vec![0; layers.end as usize * layer_bytes];
            lease.copy_range(position, 0, 0, &mut read).unwrap();
            assert!(block(hash).starts_with(&read), "wrong bytes in layers to {} of {hash}", layers.end);
            let all = lease.copy_block(position, 0, &mut vec![0; BLOCK_BYTES]);
            assert_eq!(all.is_ok(), layers.end == SHAPE.layers, "layers are read that have not come");
        }
    }
    assert_eq!(gpu.engine.session.commit_handed_over(&reservation, &[0, 1, 2]).wait().unwrap(), 3);
    let whole = gpu.lane.part(&gpu.tensors, &(2..5));
    assert!(matches!(whole, Err(LaneError::Mismatch(_))), "there is no layer 4");
}

#[test]
fn a_load_waits_for_the_engines_flag_and_keeps_its_lease_though_nobody_waits_for_it() {
    let node = NodeProcess::small(LARDER).unwrap();
    let gpu = GpuEngine::connect(&node);
    gpu.engine.put(&prompt(b'a', 2));
    let lease = gpu.lease(&prompt(b'a', 2));
    let flags = CopyFlags { after: Some((0, 1)), then: None };
    let copy = gpu.lane.load(&gpu.tensors, &lease, &GpuPages::load(2), flags).unwrap();
    assert_eq!((copy.wait(Duration::from_millis(1)), copy.layers()), (None, 0));
    let leases = Arc::downgrade(&lease);
    drop((copy, lease));
    assert_eq!((gpu.lane.under_way(), leases.strong_count()), (1, 1));
    gpu.lane.flags().set_word(0, 1);
    until("the lease is given back", || (leases.strong_count() == 0).then_some(()));
    assert!(gpu.has(1, &prompt(b'a', 2)[1], 0..SHAPE.layers));
}

#[test]
fn when_a_device_is_lost_its_leases_end_with_it_and_the_engine_hears_of_it() {
    let node = NodeProcess::small(LARDER).unwrap();
    let gpu = GpuEngine::connect(&node);
    gpu.engine.put(&prompt(b'a', 2));
    let load = |flags| gpu.lane.load(&gpu.tensors, &gpu.lease(&prompt(b'a', 2)), &GpuPages::load(2), flags);
    gpu.control.fail_next(Fault::Lose { after: 3 });
    let copy = load(CopyFlags::default()).unwrap();
    assert_eq!(copy.wait(LONG), Some(Err(CopyError::Lost)));
    until("the device is gone", || (gpu.lane.under_way() == 0).then_some(()));
    assert_eq!(gpu.control.gone(), 1);
    assert!(matches!(load(CopyFlags::default()), Err(LaneError::Gone)));
    assert_eq!(gpu.engine.get(&prompt(b'a', 2)), 2, "its own copies still work");
}

#[test]
fn pages_that_are_not_those_of_the_lease_are_refused() {
    let node = NodeProcess::small(LARDER).unwrap();
    let gpu = GpuEngine::connect(&node);
    gpu.engine.put(&prompt(b'a', 2));
    let lease = gpu.lease(&prompt(b'a', 2));
    let load = |load: LoadPages| gpu.lane.load(&gpu.tensors, &lease, &load, CopyFlags::default());
    let too_many = GpuPages::load(3);
    assert!(matches!(load(too_many), Err(LaneError::Mismatch(_))));
    let beyond = LoadPages { first_page: u64::MAX, ..GpuPages::load(2) };
    assert!(matches!(load(beyond), Err(LaneError::Mismatch(_))));
    let Engine { session, namespace } = &gpu.engine;
    let reservation = session.reserve(namespace, &namespace.chain(prompt(b'b', 1)), 0).wait().unwrap();
    let save = SavePages { block: 0, pages: GpuPages::of(0), layers: 0..u32::MAX };
    let staged = session.stage(&reservation, 0).wait().unwrap();
    let refused = gpu.lane.save(&gpu.tensors, staged, &save, CopyFlags::default());
    assert!(matches!(refused, Err(LaneError::Mismatch(_))));
    let no_such_page = LoadPages { pages: vec![SHAPE.pages], ..GpuPages::load(1) };
    assert_eq!(load(no_such_page).unwrap().wait(LONG), Some(Err(CopyError::Refused)));
    let no_such_layer = LoadPages { layers: 3..5, ..GpuPages::load(1) };
    assert!(matches!(load(no_such_layer), Err(LaneError::Mismatch(_))));
}
