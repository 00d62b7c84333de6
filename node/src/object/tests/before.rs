//! Objects that the previous release wrote are read as they were written.

use super::*;
use crate::disk::tests::before::Written;

#[test]
fn objects_of_the_release_before_are_read() {
    let (folder, slots, written) = (tempfile::tempdir().unwrap(), Slots::new(), Written::all());
    for Written { object: (path, bytes), .. } in &written {
        let path = folder.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
    let url = format!("file://{}", folder.path().display());
    let tier = ObjectTier::open(&options(&url), metrics()).unwrap();
    for chunk in &written {
        let answer = tier.read(chunk.read_order(&slots)).unwrap().blocking_recv().unwrap();
        chunk.assert_right(&slots, &answer);
    }
}
