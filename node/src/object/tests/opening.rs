//! The stores that a tier opens, and its errors about the others.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;

use super::*;
use crate::object::metrics::Side;

fn refused(options: &ObjectOptions) -> String {
    let Err(error) = ObjectTier::open(options, metrics()) else { panic!("it opened") };
    assert!(!format!("{error} {error:?} {options:?}").contains(SECRET), "nothing secret is shown");
    error.to_string()
}

/// An S3 store at an address where nobody listens.
fn nobody() -> ObjectOptions {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let endpoint = format!("http://127.0.0.1:{port}");
    let settings = [("endpoint", endpoint.as_str()), ("access_key_id", "id"), ("secret_access_key", SECRET)];
    let settings = settings.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    ObjectOptions { settings, deadline: Duration::from_millis(300), ..options("s3://bucket/prefix") }
}

#[test]
fn a_url_that_names_no_store_says_what_one_looks_like() {
    for url in ["no url", "ftp://host/path", "memory:///", "http://host/bucket"] {
        let said = refused(&options(url));
        assert!(said.contains("knows no store") && said.contains("write s3://BUCKET/PREFIX"), "{said}");
    }
}

#[test]
fn a_setting_that_the_store_does_not_have_is_named() {
    let mut options = nobody();
    options.settings.insert("key_of_access".to_owned(), SECRET.to_owned());
    assert!(refused(&options).contains("S3 has no setting `key_of_access`"));
}

#[test]
fn a_folder_that_cannot_be_made_is_named() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let said = refused(&options(&format!("file://{}/below", file.path().display())));
    assert!(said.contains("cannot be made"), "{said}");
}

#[test]
fn a_store_where_nobody_answers_is_an_error_that_says_so() {
    let said = refused(&nobody());
    assert!(said.contains("s3://bucket/prefix") && said.contains("check endpoint"), "{said}");
}

#[test]
fn a_store_that_asks_for_a_pause_is_left_alone_for_it() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            while lines.next().is_some_and(|line| line.is_ok_and(|line| !line.is_empty())) {}
            let head =
                "HTTP/1.1 503 Slow Down\r\nRetry-After: 70\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
            // An error: the client gave up.
            _ = stream.write_all(head.as_bytes());
        }
    });
    let mut options = ObjectOptions { start_without: true, allow_http: true, ..nobody() };
    options.settings.insert("endpoint".to_owned(), endpoint);
    let tier = ObjectTier::open(&options, metrics()).unwrap();
    assert!(tier.is_closed(Side::Reading));
    let left = tier.asked_pause().unwrap().duration_since(Instant::now());
    assert!((60..=70).contains(&left.as_secs()), "{left:?}");
}

#[test]
fn a_node_may_start_without_its_store() {
    let tier = ObjectTier::open(&ObjectOptions { start_without: true, ..nobody() }, metrics()).unwrap();
    assert!(tier.is_closed(Side::Reading) && tier.is_closed(Side::Writing));
    assert!(tier.write(Slots::new().write_order(single(1))).is_err());
}

#[test]
fn a_node_that_never_writes_needs_no_right_to_write() {
    for refuses_reads in [false, true] {
        let store = Faulty::default();
        (store.faults().refuses_writes, store.faults().refuses_reads) = (true, refuses_reads);
        let opened = (Arc::new(store.clone()) as Arc<dyn ObjectStore>, Path::from(PREFIX));
        let options = ObjectOptions { writes: false, start_without: true, ..options("s3://bucket") };
        let metrics = metrics();
        let tier = ObjectTier::start(opened, &options, metrics.clone()).unwrap();
        assert_eq!((tier.is_closed(Side::Reading), tier.is_closed(Side::Writing)), (refuses_reads, false));
        assert_eq!((metrics.closings(Side::Writing), store.faults().puts), (0, 0));
    }
}

#[test]
fn a_store_that_refuses_to_write_or_to_tell_is_an_error_that_says_what_to_allow() {
    for refuses_reads in [false, true] {
        let store = Faulty::default();
        store.faults().refuses_reads = refuses_reads;
        store.faults().refuses_writes = !refuses_reads;
        let opened = (Arc::new(store) as Arc<dyn ObjectStore>, Path::from(PREFIX));
        let Err(error) = ObjectTier::start(opened, &options("s3://bucket"), metrics()) else {
            panic!("it opened")
        };
        let asked = if refuses_reads { "read an object" } else { "write an object" };
        let wanted = format!("may not {asked} (AccessDenied): allow them");
        assert!(error.to_string().contains(&wanted) && !error.to_string().contains(SECRET), "{error}");
    }
}

#[test]
fn a_bucket_that_does_not_exist_is_an_error_for_a_node_that_only_reads_too() {
    let store = Faulty::default();
    store.faults().lacks_bucket = true;
    let opened = (Arc::new(store) as Arc<dyn ObjectStore>, Path::from(PREFIX));
    let options = ObjectOptions { writes: false, ..options("s3://bucket") };
    let Err(error) = ObjectTier::start(opened, &options, metrics()) else { panic!("it opened") };
    assert!(error.to_string().contains("there is no such bucket"), "{error}");
}

#[test]
fn a_store_that_refuses_deletions_serves_and_is_found_by_a_check() {
    for refuses_deletes in [false, true] {
        let store = Faulty::default();
        store.faults().refuses_deletes = refuses_deletes;
        let opened = (Arc::new(store) as Arc<dyn ObjectStore>, Path::from(PREFIX));
        let tier = ObjectTier::start(opened, &options("s3://bucket"), metrics()).unwrap();
        assert!(tier.write(Slots::new().write_order(single(1))).is_ok());
        let said = tier.not_deleted().map(|trouble| trouble.to_string());
        let is_said = said.is_some_and(|said| said.contains("may not delete an object"));
        assert_eq!(is_said, refuses_deletes);
    }
}

#[test]
fn half_uploads_that_nobody_writes_any_more_are_removed_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let name = record::name(&Path::default(), &ObjectKey { chunk: single(1).key(), block: BLOCKS[0] });
    let file = |name: &str, age| {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let file = std::fs::File::create(&path).unwrap();
        file.set_modified(std::time::SystemTime::now() - age).unwrap();
        path
    };
    let (old, new) = (leftovers::LEFT_FOR, leftovers::LEFT_FOR - Duration::from_secs(60));
    let gone = [file("v1/probe#1", old), file(&format!("{name}#1"), old), file(&format!("{name}#17"), old)];
    let stay = [
        file("v1/probe", old),
        file(name.as_ref(), old),
        file(&format!("{name}#2"), new),
        file(&format!("{name}#"), old),
        file(&format!("{name}#1a"), old),
        file("v1/notes#1", old),
        file("probe#1", old),
    ];
    let url = format!("file://{}", folder.path().display());
    let tier = ObjectTier::open(&ObjectOptions { writes: false, ..options(&url) }, metrics()).unwrap();
    drop(tier);
    assert!(gone.iter().all(|path| path.exists()), "a node that only reads removes nothing");
    let stops = std::sync::atomic::AtomicBool::new(true);
    assert_eq!(leftovers::remove(&folder.path().join("v1"), &stops).unwrap(), 0);
    let tier = ObjectTier::open(&options(&url), metrics()).unwrap();
    while gone.iter().any(|path| path.exists()) {
        std::thread::yield_now();
    }
    drop(tier);
    // The tier itself deletes its probe.
    assert!(stay[1..].iter().all(|path| path.exists()));
    assert!(!folder.path().join("v1/probe#0").exists());
}

const SECRET: &str = "confidential";
