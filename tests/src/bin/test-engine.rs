//! An engine process that does one thing to a node: `test-engine SOCKET DEED`.

use std::path::Path;

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, socket, deed] = &arguments[..] else { anyhow::bail!("test-engine SOCKET DEED") };
    larder_tests::engine::run(Path::new(socket), deed)
}
