//! Writes each target's examples into a folder: the first inputs of cargo-fuzz.
//!
//!     cargo run -p larder-fuzz --example seeds -- FOLDER

use std::path::PathBuf;
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let folder = PathBuf::from(env::args_os().nth(1).expect("the folder is the first argument"));
    for target in larder_fuzz::TARGETS {
        let folder = folder.join(target.name);
        fs::create_dir_all(&folder)?;
        for (number, example) in (target.examples)().iter().enumerate() {
            fs::write(folder.join(format!("example-{number}")), example)?;
        }
    }
    Ok(())
}
