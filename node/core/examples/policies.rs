//! Prints block hit rates of policies over capacities for Mooncake traces: `policies FILE [POLICY,..] [CAPACITY,..]`.

use std::error::Error;
use std::time::SystemTime;

use larder_core::store::policy::PolicyName;
use larder_core::store::replay::{TraceRequest, replay};
use serde::Deserialize;

/// The needed fields of a line.
#[derive(Deserialize)]
struct Line {
    timestamp: u64,
    input_length: u64,
    hash_ids: Vec<u64>,
}

#[expect(clippy::print_stdout, reason = "printing is what this program is for")]
fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let file = arguments.next().ok_or("usage: policies FILE [POLICY,..|all] [CAPACITY,..]")?;
    let policies = match arguments.next().as_deref() {
        None | Some("all") => PolicyName::ALL.to_vec(),
        Some(names) => names.split(',').map(str::parse).collect::<Result<_, _>>()?,
    };
    let capacities =
        arguments.next().unwrap_or_else(|| "500,1000,2000,3000,5000,10000,20000,30000,50000".into());
    let capacities = capacities.split(',').map(str::parse).collect::<Result<Vec<u64>, _>>()?;
    let requests = read(&std::fs::read_to_string(file)?)?;

    print!("{:10}", "");
    capacities.iter().for_each(|capacity| print!("{capacity:>9}"));
    println!("{:>9}", "ns/op");
    for policy in policies {
        print!("{:10}", policy.as_str());
        let (started, mut operations) = (SystemTime::now(), 0);
        for &capacity in &capacities {
            let replayed = replay(&requests, CHUNK_TOKENS, capacity, policy, true);
            operations += replayed.operations;
            print!("{:9.2}", 100.0 * replayed.blocks_hit as f64 / replayed.blocks_asked as f64);
        }
        println!("{:9.0}", started.elapsed()?.as_nanos() as f64 / operations as f64);
    }
    Ok(())
}

fn read(text: &str) -> Result<Vec<TraceRequest>, serde_json::Error> {
    let request = |line| {
        let Line { timestamp, input_length, hash_ids } = serde_json::from_str(line)?;
        Ok(TraceRequest { at_ms: timestamp, tokens: input_length, blocks: hash_ids })
    };
    text.lines().map(request).collect()
}

const CHUNK_TOKENS: u32 = 512;
