//! The allowed contents of a configuration file, and the errors of a wrong one.

use super::*;

#[test]
fn an_empty_file_is_the_default_configuration() {
    assert_eq!(Config::parse(""), Ok(Config::default()));
}

/// The configuration file that deployments use by default.
const DEPLOYED: &str = include_str!("../../../deploy/config/node.toml");

#[test]
fn the_deployed_file_is_the_default_configuration() {
    assert_eq!(Config::parse(DEPLOYED).unwrap(), Config::default());
}

#[test]
fn what_is_commented_out_in_the_deployed_file_is_the_default_too() {
    let optional = DEPLOYED.split_once("\n# [record]").unwrap().1;
    let is_key = |line: &str| {
        let name = line.split_once(" = ").map(|(name, _)| name);
        name.is_some_and(|name| name.chars().all(|c| c == '_' || c.is_ascii_lowercase()))
    };
    let lines = optional.lines().filter_map(|line| line.strip_prefix("# "));
    let set: String = lines
        .filter(|line| ["[audit]", "[cluster]", "[disk]", "[object]"].contains(line) || is_key(line))
        .map(|line| format!("{line}\n"))
        .collect();
    let all = Config::parse(&format!("[record]\n{set}")).unwrap();
    let (record, disk, cluster) = (all.record.unwrap(), all.disk.unwrap(), all.cluster.unwrap());
    let (object, audit) = (all.object.unwrap(), all.audit.unwrap());
    let least = Config::parse(&format!(
        "[record]\npath = {:?}\n[audit]\npath = {:?}\n[disk]\nfolder = {:?}\ncapacity_bytes = \"1TiB\"\n[object]\nurl = {:?}\nendpoint = {:?}\n\
         settings = {{ region = {:?} }}\n[cluster]\ncoordinator = {:?}\nca = {:?}\ncertificate = {:?}\nkey = {:?}\n\
         advertise = \"{}\"\nzone = {:?}\nsend_bytes_per_second = {}\nblock_threads = {}\n",
        record.path,
        audit.path,
        disk.folder,
        object.url,
        object.endpoint.clone().unwrap(),
        object.settings["region"],
        cluster.coordinator,
        cluster.ca,
        cluster.certificate,
        cluster.key,
        cluster.advertise.unwrap(),
        cluster.zone.as_ref().unwrap(),
        cluster.send_bytes_per_second.unwrap().0,
        cluster.block_threads.unwrap()
    ));
    let least = least.unwrap();
    assert_eq!((Some(record), Some(disk), Some(cluster)), (least.record, least.disk, least.cluster));
    assert_eq!((Some(object), Some(audit)), (least.object, least.audit));
}

#[test]
fn every_key_can_be_set() {
    let config = Config::parse(
        r#"
        name = "a"
        trust_engines = true
        [http]
        listen = "[::]:1"
        [host]
        arena_bytes = "64GiB"
        capacity_chunks = 7
        extent_bytes = 4194304
        high_watermark = 0.9
        low_watermark = 0.8
        policy = "sieve"
        recompute_doubles_at = 128
        huge_pages = "never"
        [[gpus]]
        pci = "0000:65:00.0"
        [[gpus]]
        pci = "00000000:E5:00.1"
        [[tenants]]
        name = "red"
        socket = "/run/red.sock"
        max_bytes = "1GB"
        [session]
        max_sessions = 1
        max_window_bytes = "1MiB"
        max_leased_blocks = 2
        max_pinned_fraction = 0.25
        reservation_ttl_ms = 3
        max_pin_ms = 4
        max_lingering_processes = 5
        [disk]
        folder = "/disk"
        capacity_bytes = "2TiB"
        segment_bytes = "1MiB"
        write = "write_back"
        write_after_uses = 3
        scrub_bytes_per_second = 0
        read_deadline_ms = 6
        [object]
        url = "s3://bucket/prefix"
        endpoint = "http://127.0.0.1:9000"
        allow_http = true
        settings = { region = "eu-central-1" }
        write = "off"
        write_after_uses = 3
        max_requests = 4
        queue_orders = 5
        request_timeout_ms = 6
        read_deadline_ms = 7
        find_deadline_ms = 8
        "#,
    )
    .unwrap();
    let written = toml::to_string(&config).unwrap();
    assert_eq!(Config::parse(&written), Ok(config.clone()), "what is written is what is read: {written}");
    assert_eq!(config.host.arena_bytes, ByteSize::gib(64));
    assert_eq!(config.host.extent_bytes, Some(ByteSize::mib(4)));
    assert_eq!(config.host.huge_pages, HugePages::Never);
    assert_eq!(config.host.recompute_doubles_at, NonZeroU32::new(128));
    assert_eq!(config.tenants[0].max_bytes, Some(ByteSize(1_000_000_000)));
    assert_eq!(config.gpus[1].pci.to_string(), "0000:e5:00.1");
    assert_eq!(config.session.max_lingering_processes, 5);
    let object = config.object.unwrap();
    assert_eq!((Option::<WritePolicy>::from(object.write), object.max_requests), (None, 4));
    let disk = config.disk.unwrap();
    assert_eq!((disk.write, disk.capacity_bytes), (WritePolicy::WriteBack, ByteSize::tib(2)));
}

#[test]
fn an_error_names_the_line_the_key_and_the_nearest_known_one() {
    let cases = [
        (
            "[host]\narena_byte = 5",
            "line 2: unknown field `arena_byte`, expected one of `arena_bytes`, ",
            "mean `arena_bytes`?",
        ),
        (
            "\n\n[host]\nhuge_pages = \"newer\"",
            "line 4: unknown variant `newer`, expected `auto` or `never`",
            "mean `never`?",
        ),
        ("[hist]", "line 1: unknown field `hist`, expected one of `name`, ", "mean `host`?"),
        ("[sessoin]", "line 1: unknown field `sessoin`, ", "mean `session`?"),
        ("[[tenants]]\nname = \"a\"", "line 1: missing field `socket`", "`socket`"),
        ("[[tenants]]\nname = \"a\"\nsocket = \"b\"\nmax = 1", "line 4: unknown field `max`", ""),
        (
            "[host]\narena_bytes = \"1GX\"",
            "line 2: invalid value: string \"1GX\", expected a size: ",
            "\"1GiB\" (2^30)",
        ),
        (
            "[host]\narena_bytes = -1",
            "line 2: invalid value: integer `-1`, expected a size: ",
            "\"1GB\" (10^9)",
        ),
        ("[host]\narena_bytes = true", "line 2: invalid type: boolean `true`, expected a size: ", ""),
        (
            "[http]\nlisten = \"localhost:9440\"",
            "line 2: invalid value: string \"localhost:9440\", expected an IP address and a port, ",
            "\"127.0.0.1:9440\"",
        ),
        ("[cluster]\nadvertise = 9441", "line 2: invalid type: integer `9441`, ", "an IP address and a port"),
        ("[[gpus]]\npci = \"65:00\"", "line 2: ", "0000:65:00.0"),
        ("[session]\nmax_sessions = -1", "line 2: ", "-1"),
        ("[host]\nrecompute_doubles_at = 0", "line 2: ", "nonzero"),
        ("[host]\npolicy = 1\npolicy = 2", "line 3: ", "duplicate key"),
    ];
    for (text, start, part) in cases {
        let error = Config::parse(text).unwrap_err().to_string();
        assert!(error.starts_with(start) && error.contains(part), "{text:?} gives: {error}");
    }
}

#[test]
fn an_error_in_a_file_names_the_file() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "x = 1").unwrap();
    let error = Config::load(file.path()).unwrap_err();
    assert_eq!(error.to_string(), file.path().display().to_string());
    assert!(std::error::Error::source(&error).unwrap().to_string().starts_with("line 1: unknown field `x`"));
    let missing = Config::load(Path::new("/nowhere/larder.toml")).unwrap_err();
    assert_eq!(missing.to_string(), "cannot read the configuration /nowhere/larder.toml");
}
