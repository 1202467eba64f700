//! The planner's stories: a fleet in memory, played by hand or to the end, and what the planner says about it.
//!
//! | file | what must be true there |
//! |---|---|
//! | `fixture` | builders for fleets, and an API and kubelets in memory that carry plans out |
//! | `table` | every state in every situation: the decision and the reason's words |
//! | `slots` | who may start, and when |
//! | `stages` | who goes first, and what opens the next part |
//! | `queries` | what Prometheus says of a stage that bakes |
//! | `waves` | who goes together, and who does not |
//! | `windows` | when anybody may start |
//! | `people` | what people do to labels and cordons, pauses, retries |
//! | `pods` | who is asked to leave, when, and what happens if they do not |
//! | `coming_back` | restart and validation |
//! | `clients` | who holds on to a driver that is gone, who is replaced, and when |
//! | `health` | the hand-shake with NVSentinel |
//! | `driver_manager` | what the driver manager says on its node |
//! | `corners` | who uses the device, what can never leave, what is given back, what restarts in place |
//! | `pools` | whose policy rules, and what freezes a pool |
//! | `answers` | who is responsible, what is next, what a person can do: for every reason |
//! | `drivers` | two drivers on one node |
//! | `rollbacks` | the way back from a version that went wrong |
//! | `kernels` | … where a pool has several DaemonSets |
//! | `rollouts` | what is said about the pool as a whole |
//! | `sizes` | … and that it stays within bounds |
//! | `promises` | bad plans are caught |
//! | `properties` | what holds for any fleet |
//! | `found` | … and what has found its way here from there |
//! | `judge` | … counted apart from the planner |
//! | `sketch` | … and any fleet, drawn by chance |

mod answers;
mod clients;
mod coming_back;
mod corners;
mod driver_manager;
mod drivers;
mod fixture;
mod found;
mod gates;
mod health;
mod judge;
mod kernels;
mod left_alone;
mod matrix;
mod people;
mod pods;
mod pools;
mod promises;
mod properties;
mod queries;
mod rollbacks;
mod rollouts;
mod sizes;
mod sketch;
mod slots;
mod stages;
mod table;
mod waves;
mod windows;
