//! libFuzzer's door to the targets. `PITCREW_FUZZ_TARGET` says which; the stock of JSON to draw from is the target's corpus.

#![no_main]
#![allow(unsafe_code, reason = "libFuzzer calls C functions")]

use std::path::Path;
use std::sync::LazyLock;

use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};
use pitcrew_fuzz::{Stock, Target};

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let name = std::env::var("PITCREW_FUZZ_TARGET").expect("PITCREW_FUZZ_TARGET names the target");
    Target::named(&name).unwrap_or_else(|| panic!("there is no target {name}"))
});

static STOCK: LazyLock<Stock> = LazyLock::new(|| {
    Stock::from_directory(&Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(TARGET.name))
});

fuzz_target!(|input: &[u8]| TARGET.feed(input));

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    let changed = TARGET.is_json.then(|| STOCK.change(&data[..size], seed, max_size)).flatten();
    match changed {
        Some(changed) => {
            data[..changed.len()].copy_from_slice(&changed);
            changed.len()
        }
        None => fuzzer_mutate(data, size, max_size),
    }
});
