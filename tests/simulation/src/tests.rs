//! The histories of seeds are unchanged, every oracle can fail, and every planted fault fits the sources.

use std::path::Path;
use std::time::Duration;

use larder_core::placement::PlacementRule;
use larder_core::store::WritePolicy;
use larder_core::store::policy::PolicyName;

use crate::bytes::Doing;
use crate::world::{At, Life, Settings, World};

/// A cluster without faults that has lived for some seconds.
fn cluster(seed: u64) -> World {
    let settings = Settings {
        nodes: 3,
        actors: 2,
        coordinators: 1,
        policy: PolicyName::Lru,
        write: WritePolicy::WriteThrough,
        placement: PlacementRule::Worth,
        capacity_chunks: None,
        has_disk: true,
        has_objects: false,
    };
    let mut world = World::new(seed, settings, Vec::new(), false);
    world.run_until(Duration::from_secs(4));
    assert_eq!(world.violation, None);
    world
}

/// The violation that breaking the world causes.
fn violation(mut world: World, breaks: impl FnOnce(&mut World)) -> String {
    breaks(&mut world);
    world.violation.expect("an oracle sees it")
}

/// A cluster in which an engine has leased a block; the actor that has the block; the reading.
fn with_reader() -> (World, At, crate::bytes::Reading) {
    let found = |world: &World| {
        let processes = world.hosts.iter().filter_map(|host| host.process.as_ref());
        let mut actors = processes.flat_map(|process| {
            (0..).zip(&process.actors).map(|(actor, known)| (At { life: process.life, actor }, known))
        });
        actors.find_map(|(at, actor)| {
            let mut readings = actor.uses.readings.values().flatten();
            readings.find(|reading| reading.to > 0).map(|reading| (at, *reading))
        })
    };
    let mut read =
        (1..).map(cluster).filter_map(|world| found(&world).map(|(at, reading)| (world, at, reading)));
    read.next().expect("an engine of some seed reads at this moment")
}

fn first_life(world: &World) -> Life {
    world.hosts[0].process.as_ref().map(|process| process.life).expect("the first node lives")
}

#[test]
fn a_seed_has_the_same_history_twice() {
    let [one, other] = [(); 2].map(|()| {
        let world = cluster(7);
        (world.hash(), world.events())
    });
    assert_eq!(one, other);
    assert!(one.1 > 2_000, "too little happens: {} events", one.1);
}

#[test]
fn wrong_bytes_under_a_lease_are_seen() {
    let (world, at, reading) = with_reader();
    let said = violation(world, |world| {
        if let Some(memory) = world.actor(at).and_then(|actor| actor.memory[reading.extent as usize].clone())
        {
            memory.copy_in(reading.offset, &[1; 8]).expect("it lies within its extent");
        }
        world.must_hold(at, &reading);
    });
    assert!(said.contains("wrong bytes"), "{said}");
}

#[test]
fn writing_where_somebody_reads_is_seen() {
    let (world, at, reading) = with_reader();
    let said = violation(world, |world| {
        let span = (reading.extent, reading.offset, reading.offset + 8);
        world.begin_spans(at, Doing::Device(1), &[span], true);
    });
    assert!(said.contains("uses memory that"), "{said}");
}

#[test]
fn an_older_epoch_is_seen() {
    let said = violation(cluster(1), |world| {
        let life = first_life(world);
        let table = world.leaders_table().expect("there is a table");
        let own =
            world.process(life).map(|process| process.follower.following.known().own).unwrap_or_default();
        let mut older = (*table).clone();
        older.epoch.number -= 1;
        world.take_table(life, older.into(), own);
    });
    assert!(said.contains("back to"), "{said}");
}

#[test]
fn missing_rows_are_seen() {
    let mut world = cluster(1);
    world.is_busy = false;
    world.run_until(Duration::from_secs(30));
    assert_eq!(world.rows_that_differ(), None);
    let life = first_life(&world);
    world.directory_panics(life.host);
    let differs = world.rows_that_differ().expect("the directory of a node is empty");
    assert!(differs.contains("is missing"), "{differs}");
}

#[test]
fn leftovers_at_rest_are_seen() {
    let said = violation(cluster(1), World::check_rest);
    assert!(said.contains("are left at rest"), "{said}");
}

#[test]
fn an_alarm_beside_another_is_seen() {
    let said = violation(cluster(1), |world| {
        let at = At { life: first_life(world), actor: 0 };
        world.alarm_rings(at, Duration::ZERO);
    });
    assert!(said.contains("rings beside"), "{said}");
}

#[test]
fn a_request_without_an_answer_is_seen() {
    let said = violation(cluster(1), |world| {
        // Sooner or later, an engine has waited for a moment.
        for _ in 0..1_000 {
            world.run_until(world.now + Duration::from_micros(20));
            (0..world.engines.len()).for_each(|engine| world.check_waiting(engine, Duration::ZERO));
        }
    });
    assert!(said.contains("has no answer"), "{said}");
}

#[test]
fn damage_that_nobody_did_is_seen() {
    let said = violation(cluster(1), |world| {
        let life = first_life(world);
        world.saw_damage(life, 1);
    });
    assert!(said.contains("nothing was flipped"), "{said}");
}

#[test]
fn all_planted_faults_fit_the_sources_together() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let all = crate::planted::all(&sources).expect("planted faults can be read");
    assert!(all.len() >= 25, "only {} planted faults", all.len());
    let mut files = std::collections::BTreeMap::new();
    for planted in all {
        let read = || std::fs::read_to_string(sources.join(&planted.file)).expect("its file is there");
        let text = files.entry(planted.file.clone()).or_insert_with(read);
        *text = planted.apply(text).expect("it fits");
    }
}
