//! Dev.
use pitcrew_sim::simulate::{Case, Wish, run};
fn main() {
    tracing_subscriber::fmt().with_env_filter(tracing_subscriber::EnvFilter::from_default_env()).init();
    let args: Vec<u64> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let trace = std::env::var("TRACE").is_ok();
    let nodes = std::env::var("NODES").ok().and_then(|n| n.parse().ok());
    let faults = std::env::var("FAULTS")
        .ok()
        .map(|f| f.split(',').filter(|f| !f.is_empty()).map(|f| f.parse().unwrap()).collect());
    let wish = Wish { nodes, faults, minutes: None };
    let began = std::time::Instant::now();
    let (mut bad, mut changes, mut vt, mut n) = (0, 0, 0.0, 0);
    let mut by: std::collections::BTreeMap<String, Vec<u64>> = Default::default();
    for seed in args[0]..args[1] {
        let case = Case::new(seed, &wish);
        let t = std::time::Instant::now();
        match run(&case, trace) {
            Ok(run) => {
                n += run.nodes;
                changes += run.changes;
                vt += run.time.as_secs_f64();
                if trace {
                    for e in &run.trace {
                        println!("{} {}", e.at.strftime("%H:%M:%S%.3f"), e.text);
                    }
                    println!("{:#?}", case.policy);
                    println!("faults {:?}", case.faults);
                }
                if std::env::var("V").is_ok() {
                    println!(
                        "{seed} nodes {} changes {} time {:.0?} hash {:x} in {:.1?}",
                        run.nodes,
                        run.changes,
                        run.time,
                        run.hash,
                        t.elapsed()
                    );
                }
                if let Some(v) = run.violation {
                    bad += 1;
                    by.entry(v.promise.to_string()).or_default().push(seed);
                    println!(
                        "seed {seed} nodes {}: {} {:?} {} at {}",
                        run.nodes,
                        v.promise,
                        v.node,
                        v.what,
                        v.at.strftime("%H:%M:%S%.3f")
                    );
                }
            }
            Err(e) => {
                bad += 1;
                println!("seed {seed}: {e:?}");
            }
        }
    }
    println!("{bad} bad, {n} nodes, {changes} changes, {vt:.0} virtual s, {:.1?}", began.elapsed());
    for (p, s) in by {
        println!("{p}: {} {:?}", s.len(), &s[..s.len().min(8)]);
    }
}
