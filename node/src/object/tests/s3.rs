//! The tier on a real server that speaks S3: `moto_server`, which `tests/run` installs from PyPI.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use super::*;

/// A server of its own for one test.
struct Server {
    process: Child,
    address: String,
}

impl Server {
    /// Starts the server with an empty bucket `larder`; `None` if the server is not installed. With `checks`, it refuses requests
    /// without an account.
    fn start(checks: bool) -> Option<Self> {
        let installed = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/tools/venv/bin/moto_server");
        let program = if std::path::Path::new(installed).exists() { installed } else { "moto_server" };
        let mut command = Command::new(program);
        command.args(["-H", "127.0.0.1", "-p", "0"]).stdout(Stdio::null()).stderr(Stdio::piped());
        if checks {
            // All requests but the first, which makes the bucket.
            command.env("INITIAL_NO_AUTH_ACTION_COUNT", "1");
        }
        let Ok(mut process) = command.spawn() else {
            larder_skips::skip("there is no moto_server");
            return None;
        };
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
        let said =
            |line: std::io::Result<String>| Some(line.ok()?.split_once("Running on http://")?.1.to_owned());
        let address = lines.find_map(said);
        // Later output is read and dropped, so that the server never waits for a reader.
        std::thread::spawn(move || lines.for_each(drop));
        let server = Self { process, address: address.expect("it says where it listens").trim().to_owned() };
        let mut stream = TcpStream::connect(&server.address).unwrap();
        let authorization = "AWS4-HMAC-SHA256 Credential=id/20260101/us-east-1/s3/aws4_request, \
             SignedHeaders=host, Signature=0";
        let host = &server.address;
        write!(
            stream,
            "PUT /larder HTTP/1.1\r\nHost: {host}\r\nAuthorization: {authorization}\r\n\
             Content-Length: 0\r\nConnection: close\r\n\r\n"
        )
        .unwrap();
        let mut said = String::new();
        stream.read_to_string(&mut said).unwrap();
        assert!(said.starts_with("HTTP/1.1 200"), "{said}");
        Some(server)
    }

    fn options(&self, bucket: &str) -> ObjectOptions {
        let endpoint = format!("http://{}", self.address);
        let settings = [
            ("endpoint", endpoint.as_str()),
            ("region", "us-east-1"),
            ("access_key_id", "id"),
            ("secret_access_key", "confidential"),
        ];
        let settings = settings.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let find_deadline = Duration::from_secs(10);
        ObjectOptions { settings, find_deadline, ..options(&format!("s3://{bucket}/some/prefix")) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The server may be gone already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn write(tier: &ObjectTier, slots: &mut Slots, number: u64) -> WriteAnswer {
    tier.write(slots.write_order(single(number))).unwrap().blocking_recv().unwrap()
}

fn read(tier: &ObjectTier, slots: &Slots, number: u64) -> ReadAnswer {
    tier.read(slots.read_order(single(number))).unwrap().blocking_recv().unwrap()
}

#[test]
fn chunks_live_and_die_in_a_real_s3_store() {
    let Some(server) = Server::start(false) else { return };
    let (options, metrics_here) = (server.options("larder"), metrics());
    let tier = ObjectTier::open(&options, metrics_here.clone()).unwrap();
    let mut slots = Slots::new();
    assert_eq!(read(&tier, &slots, 0), ReadAnswer::NotHeld);
    for number in 0..12 {
        assert_eq!(write(&tier, &mut slots, number), WriteAnswer::Durable);
    }
    for number in 0..12 {
        slots.assert_right(single(number), &read(&tier, &slots, number));
    }
    // Another node finds the chunks, and uploads none again.
    let other = ObjectTier::open(&options, metrics()).unwrap();
    let chain: Vec<_> = (0..6).map(|number| single(number * 3).chunk_ref()).collect();
    let found =
        other.find(single(0).key().fingerprint, chain, BLOCKS.into()).unwrap().blocking_recv().unwrap();
    assert_eq!(found, [Some(true), Some(true), Some(true), Some(true), Some(false)]);
    assert_eq!(write(&other, &mut slots, 11), WriteAnswer::AlreadyThere);
    // The store itself refuses a chunk that this node believes absent.
    assert_eq!(read(&tier, &slots, 20), ReadAnswer::NotHeld);
    assert_eq!(write(&other, &mut slots, 20), WriteAnswer::Durable);
    assert_eq!(write(&tier, &mut slots, 20), WriteAnswer::AlreadyThere);
    assert_eq!(metrics_here.requests(Kind::Put, "exists"), 1);
}

#[test]
fn an_object_that_was_damaged_in_a_real_s3_store_is_a_miss_and_written_again() {
    let Some(server) = Server::start(false) else { return };
    let (options, metrics) = (server.options("larder"), metrics());
    let tier = ObjectTier::open(&options, metrics.clone()).unwrap();
    let mut slots = Slots::new();
    assert_eq!(write(&tier, &mut slots, 3), WriteAnswer::Durable);
    let (store, prefix) = store::open(&options, &AskedPause::default()).unwrap();
    let key = ObjectKey { chunk: single(3).key(), block: BLOCKS[0] };
    let name = record::name(&prefix, &key);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut bytes = store.get(&name).await.unwrap().bytes().await.unwrap().to_vec();
        bytes[6_000] ^= 1;
        store.put(&name, bytes.into()).await.unwrap();
    });
    assert_eq!(read(&tier, &slots, 3), ReadAnswer::Damaged);
    assert_eq!(metrics.damaged.get(), 1);
    assert_eq!(read(&tier, &slots, 3), ReadAnswer::NotHeld);
    assert_eq!(write(&tier, &mut slots, 3), WriteAnswer::Durable);
    slots.assert_right(single(3), &read(&tier, &slots, 3));
}

#[test]
fn a_real_s3_store_without_the_bucket_or_that_does_not_know_who_asks_is_a_clear_error() {
    let Some(server) = Server::start(false) else { return };
    for writes in [false, true] {
        let options = ObjectOptions { writes, ..server.options("elsewhere") };
        let Err(error) = ObjectTier::open(&options, metrics()) else { panic!("it opened") };
        let said = error.to_string();
        assert!(said.contains("there is no such bucket") && said.contains("NoSuchBucket"), "{said}");
    }
    let Some(server) = Server::start(true) else { return };
    let Err(error) = ObjectTier::open(&server.options("larder"), metrics()) else { panic!("it opened") };
    let said = error.to_string();
    assert!(said.contains("does not accept the credentials"), "{said}");
    assert!(!format!("{error:?}{said}").contains("confidential"), "{error:?}");
}

#[test]
fn a_node_outlives_its_s3_store_and_uses_it_no_more() {
    let Some(mut server) = Server::start(false) else { return };
    let options = ObjectOptions { deadline: Duration::from_secs(2), ..server.options("larder") };
    let tier = ObjectTier::open(&options, metrics()).unwrap();
    let mut slots = Slots::new();
    assert_eq!(write(&tier, &mut slots, 1), WriteAnswer::Durable);
    server.process.kill().unwrap();
    server.process.wait().unwrap();
    while let Ok(answer) = tier.read(slots.read_order(single(1))) {
        assert_eq!(answer.blocking_recv(), Ok(ReadAnswer::Closed));
    }
    assert!(tier.is_closed(metrics::Side::Reading));
}
