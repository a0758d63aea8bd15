"""What lamp --help and lamp VERB --help say: a static table, so that it answers at once."""

HELP = """\
Lamplighter: language-model training that never goes dark.

usage: lamp VERB ...

  demo                    embedded text -> tokenizer -> cache -> train -> sample, about a minute on 2 CPU cores
  train [run.yaml]        train; the same command again resumes where it stopped
  sweep [run.yaml] --over NAME=A,B   the same run with other settings, in turn, under one budget; the better half goes on
  launch slurm|sky|kubernetes [run.yaml]   the file by which a scheduler starts it, and starts it again
  watch -- CMD...         any training script, unchanged: counted, watched, explained when it hangs
  watch RUN               the live display of a run that is going on, from any terminal
  watch PID               a process that runs already, from outside: explained when it hangs
  why RUN|PID             what it is doing right now: phase, process state, the stack of every thread
  stop RUN | save RUN     end it with everything saved | save now and go on
  runs                    all runs and how they stand
  compare RUN RUN...      losses, speed, cost and settings beside each other; what may be said of the difference
  report RUN              the run as one HTML file (report.html), and its curves (curves.svg)
  dash                    a web page over all runs, live
  track RUN --to NAME     tell TensorBoard, W&B, trackio, MLflow or a CSV file all about a run, once, in order
  checkpoints RUN         step, losses, size, age, valid or not
  generate RUN|DIR        text from a model, a conversation, many prompts from a file
  eval RUN|DIR            how good it is: HellaSwag, LAMBADA, MMLU, ARC, your own tasks, with standard errors and chance
  serve RUN|DIR           the model behind OpenAI's API, with a page to chat
  export RUN|DIR          a Hugging Face folder, a GGUF file, an Ollama model: opened again and compared, or not there
  publish RUN             to the Hugging Face hub, with a model card written from the run
  plan [run.yaml]         parameters, FLOPs, memory, time, money, disk: go or no-go with the arithmetic
  doctor [run.yaml]       probes of the machine, the settings, the data and the model; each fault with its remedy
  selftest [--gpu]        the promises tried on this machine in three minutes: kill and resume, saves, faults; a table to send
  data stats|clean|prepare   count and look at text; clean it; make the token cache
  tokenizer train|show    train a tokenizer; look at one

lamp VERB --help says more; lamp --version.
"""

VERB_HELP = {
    "dash": """\
usage: lamp dash [--runs-dir DIR ...] [--port N] [--host ADDRESS] [--token TOKEN] [--name HOST]

A web page over all runs of one or more folders: live curves, verdicts with their stacks, samples, checkpoints, where the
time went, comparison. It listens on this machine alone (127.0.0.1, port 8470 or the next free one); any other --host needs a token,
which is made and printed unless one is given.

  --name HOST       a further name under which the page may be asked for, such as that of a proxy before it
""",
    "compare": """\
usage: lamp compare RUN RUN... [--json] [--runs-dir DIR]

Losses, perplexity, bits per byte, MFU, rate, time, cost, parameters, tokens and epochs beside each other; then convergence,
generalisation, efficiency, stability and what to take, with their numbers. Within the noise: not distinguishable.
Runs with different tokenizers are compared by bits per byte alone.
""",
    "report": """\
usage: lamp report RUN [--runs-dir DIR]

Writes report.html (one file, no server, the same panels as lamp dash) and curves.svg into the run's folder, as every run
does at its end.
""",
    "track": """\
usage: lamp track RUN --to tensorboard|wandb|trackio|mlflow|csv ... [--project NAME] [--name NAME] [--tags TAG ...]
                  [--group NAME] [--offline] [--no-follow] [--runs-dir DIR]

Sends each step once, in order; what was sent before is not sent again. A run that goes on is followed to its end
(--no-follow: only what is there now). The same while training: lamp train ... --track.to wandb
""",
    "demo": """\
usage: lamp demo [--run NAME] [--resume auto|never] [--detach] [--runs-dir DIR] [--section.key value]

Generates the embedded corpus, trains a tokenizer and a small model on it in about a minute, with samples, the loss
beside the floor that no model can beat, checkpoints, and a ledger of where the time went.
""",
    "train": """\
usage: lamp train [run.yaml] [--preset NAME] [--resume auto|never|checkpoint-N|PATH] [--run NAME] [--test]
                  [--verbose] [--force] [--print-config] [--detach] [--runs-dir DIR] [--section.key value ...]

  --preset NAME     one of: {presets}
  --resume HOW      auto (default): go on from the newest valid checkpoint; never: begin anew, the old folder is kept
                    as NAME.1; or a checkpoint of this run, or a path
  --run NAME        the run's name; default: the YAML's stem, else the preset
  --test            the real path, small, in under a minute
  --verbose         a line for each step
  --force           insist on a run that was refused, or on going back to the same checkpoint again
  --print-config    show the resolved run and where each value came from; start nothing
  --detach          go on without this terminal; returns when the run has begun (lamp watch RUN, lamp stop RUN)
  --runs-dir DIR    where runs live (default: runs)

Order: default < preset < run.yaml < command line. Every field:
""",
    "sweep": """\
usage: lamp sweep [run.yaml] [--preset NAME] --over NAME=VALUE,VALUE... [--halvings N] [--run NAME] [--runs-dir DIR] [--section.key value ...]

The same run with other settings: every combination of what --over gives (several times for several fields), in turn. In each round
all that are still in train to the same share of their steps, pause there, validated and saved, and the better half goes on, bit
for bit as if it had never paused. --halvings 0 trains all to the end; without it they are halved until one is left.

budget.usd and budget.hours hold for all of them together: when they are spent it ends with 75, and the same command goes on.
Room for all checkpoints is checked first; one that has lost keeps its last one. Rates are those of the optimizer that a run has without
them (Muon from scratch); precision and threads are the first one's. Made: a run for each (NAME-1, NAME-2 ...), and in
the folder NAME a table (table.md) and the settings of the best one (best.yaml).
""",
    "launch": """\
usage: lamp launch slurm [run.yaml] [-o FILE] [--submit] [--nodes N] [--gpus N] [--cpus N] [--mem M] [--time T] [--partition P]
                  [--account A] [--preset NAME] [--run NAME] [--test] [--runs-dir DIR] [--section.key value ...]
       lamp launch sky [run.yaml] --save.mirror URL [-o FILE] [--nodes N] [--gpus A100:8] [--on-demand] ...
       lamp launch kubernetes [run.yaml] --image IMAGE [-o FILE] [--claim NAME] [--gpus N] [--cpus N] [--mem M] ...

Checks the settings as lamp train does, and writes the file that starts it: TERM before the end, all saved, exit 75, started again,
resumed.

  -o FILE           where to (default: NAME.sbatch, NAME.sky.yaml, NAME.k8s.yaml)
  --submit          SLURM: give it to sbatch at once
  --gpus N          on each node; SkyPilot: kind and count, such as A100:8
  --claim NAME      Kubernetes: the PersistentVolumeClaim that holds the runs; else save.mirror does
  --on-demand       SkyPilot: no spot machines
""",
    "watch": """\
usage: lamp watch [--run NAME] [--runs-dir DIR] [--on-stuck report|stop|restart] [--patience-s S] [--notify CMD|URL] -- CMD...
       lamp watch RUN [--runs-dir DIR]
       lamp watch PID [--run NAME] [--runs-dir DIR] [--on-stuck report|stop] [--patience-s S] [--notify CMD|URL]

  -- CMD...           any command (python x.py, torchrun ..., bash run.sh): its output, keys and exit code stay its own; our
                      words go to stderr, and a run folder keeps them with every verdict
  --on-stuck HOW      report (default): name it and touch nothing; stop: end it with 70 by the rules of what is proved;
                      restart: the same, and start the command again (it must resume by itself)
  --patience-s S      how long a cause that cannot be proved is only named (default 600)
  --notify CMD|URL    told of stuck, dead, finished

With RUN: the live display of a run, from any terminal. Ctrl+C leaves the run alone.
With PID: a process that runs already, and what it has started, are looked at from outside until they end; Ctrl+C leaves them alone.
""",
    "why": """\
usage: lamp why RUN [--runs-dir DIR]
       lamp why PID [--runs-dir DIR]

Phase, process state and the stack of every thread, in a second or two; disturbs nothing. PID: any process, also one that was
started without us.
""",
    "stop": "usage: lamp stop RUN [--runs-dir DIR]\n\nSaves the last completed step and ends the run (exit 75).\n",
    "save": "usage: lamp save RUN [--runs-dir DIR]\n\nSaves the last completed step now; the run goes on.\n",
    "runs": "usage: lamp runs [--json] [--watch] [--runs-dir DIR]\n\nAll runs and how they stand; --watch: anew every second.\n",
    "checkpoints": """\
usage: lamp checkpoints RUN [--json] [--runs-dir DIR]
       lamp checkpoints RUN test [checkpoint-N] [--prompts FILE] [--interactive] [--json] [--threads N] [--runs-dir DIR]

Every checkpoint, verified against its manifest.
test     the loss of each on held-back text beside what was to be expected at that progress, a curve, texts to four prompts
         (or those in FILE) with red flags (repetition, gibberish, length, unfinished), and what to do next
""",
    "generate": """\
usage: lamp generate RUN|DIR|HUB-NAME [--prompt TEXT] [--num-samples N] [--max-tokens N] [--temperature T] [--top-k K]
                     [--top-p P] [--seed S] [--stop TEXT ...] [--repetition-penalty X] [--json]
                     [--checkpoint best|latest|checkpoint-N] [--interactive] [--prompts FILE [--out FILE]]
                     [--system TEXT] [--raw] [--data.template NAME|FILE] [--threads N] [--runs-dir DIR]
                     [--model.family MODULE:NAME] [--model.init_from BASE]

  --prompts FILE    a prompt a line, or JSON lines with "prompt": answered several at a time, as JSON lines on stdout or in --out,
                    where the same command goes on after a kill
  --interactive     a conversation: /help lists its commands (/params /set /system /clear /save /load /retry /quit)
  --json            prompt, texts, tokens and why each ended

A model that was trained on instruction rows is asked by its own chat template and gives the answer alone; --system puts
a system message before the question, --raw leaves the template out, --data.template takes another (chatml, alpaca, plain
or a .jinja file). With --interactive it remembers the conversation; an empty line begins a new one. Text goes to stdout
as it is; everything else to stderr. --temperature 0 is greedy.
A model of your own is built by the code that --model.family names: a model folder never names code. An adapter is read
with its base, which is known by its hash; one that was moved is named by --model.init_from.
""",
    "export": """\
usage: lamp export RUN|DIR [--to hf|gguf|ollama] [--quantize f32|f16|bf16|q8_0] [--merge] [--out PATH] [--name NAME] [--force]
                   [--checkpoint best|latest|checkpoint-N] [--model.init_from BASE] [--runs-dir DIR]

  --to hf           a folder that transformers opens (logits within 1e-4); of adapters a PEFT folder, or with --merge a model
  --to gguf         a file that llama.cpp runs: the same token ids, and the same words (f32) or nearly the same probabilities
  --to ollama       the file with its Modelfile; where Ollama answers, the model is created and asked a question
  --quantize HOW    f32 (hf), f16 (gguf, ollama); bf16, q8_0; k-quants such as q4_k_m by your own llama-quantize
  --out PATH        default: export/ in the run's folder; beside you for a model folder
  --force           replace what is there

Written under a temporary name, opened again by the other program and compared. What differs is refused, with both texts or
figures, and nothing is left behind.
""",
    "publish": """\
usage: lamp publish RUN --to ORG/NAME [--dry-run] [--private] [--merge] [--checkpoint best|latest|checkpoint-N]
                    [--license ID] [--out DIR] [--model.init_from BASE] [--runs-dir DIR]

Writes a model card from the run (data, tokens, parameters, curves, evaluations, settings, cost), and uploads the model
with it: no optimizer, no secrets, no prompts. The token comes from HF_TOKEN or `hf auth login`. The same command again goes on
where a broken upload stopped. --dry-run writes the folder that would be uploaded, and uploads nothing.
""",
    "eval": """\
usage: lamp eval RUN|DIR|HUB-NAME [--tasks NAME,...] [--data DIR] [--checkpoint best|latest|all|N] [--suite quick|comprehensive]
                 [--limit N] [--num-fewshot N] [--window N] [--chat] [--json] [--threads N] [--runs-dir DIR]
                 [--model.family MODULE:NAME] [--model.init_from BASE]
       lamp eval A B --human [--prompts FILE] [--page] [--runs-dir DIR]

  --data DIR        a folder or file per task: hellaswag/*.jsonl lambada/ mmlu/{dev,test}/*.csv arc_easy/ piqa/ rouge/ period/,
                    any .txt (loss, perplexity, bits per byte), any multiple choice with a task.yaml (docs/evaluation.md)
  --tasks NAME,...  of these; held-back: the run's own validation text; period without data: the demo's London;
                    lm-eval:NAME: a task of lm-eval, by its own code, on this model
                    default: held-back and all that --data has
  --checkpoint      latest (default), best, a number, or all: one result each
  --suite NAME      quick: 200 items each; comprehensive: all; the time of each task is said first
  --limit N         the first N items of each task (of MMLU: of each subject); texts (.txt, held-back) are read whole
  --num-fewshot N   solved examples before an MMLU question (default 5)
  --window N        tokens of context for the loss on a text (default 1024)
  --chat            prompts of generation tasks go by the model's own chat template
  --human           blind pairs of two models, in random order: you choose; again goes on; --page: in the browser
Each score has its n, standard error and chance level. Results are files in the run's evaluations/. Killed, it goes on where it was.
""",
    "serve": """\
usage: lamp serve RUN|DIR|HUB-NAME [--host H] [--port N] [--api-key KEY] [--max-batch N] [--max-queue N] [--context N]
                  [--timeout-s S] [--follow] [--checkpoint best|latest|checkpoint-N] [--threads N] [--runs-dir DIR]
                  [--model.family MODULE:NAME] [--model.init_from BASE]

/v1/models /v1/completions /v1/chat/completions as OpenAI has them, /health, /metrics, and a page to chat at /.
  --host, --port    127.0.0.1 and 8000; on another host a key is needed, and made where none is given
  --api-key KEY     or LAMP_API_KEY; clients send it as Authorization: Bearer KEY
  --max-batch N     texts that are written at a time (default 8); --max-queue N more wait (default 64), then 429
  --context N       tokens of a prompt and its answer together (default 2048, at most what the model reads)
  --timeout-s S     of one request (default 600)
  --follow          of a run that goes on: newer checkpoints are served as they appear; texts end on what they began with
""",
    "plan": """\
usage: lamp plan [run.yaml] [--preset NAME] [--on DEVICE[:N]] [--mfu SHARE] [--measure] [--fit] [--what-if] [--json]
                 [--runs-dir DIR] [--section.key value ...]

  --on DEVICE[:N]   t4 v100-16gb l4 a10 rtx3090 rtx4090 a100-40gb a100-80gb l40s h100-80gb h200; default: this machine
                    (a100-80gb:8 is eight of them, each at budget.usd_per_hour)
  --mfu SHARE       of the peak that is reached (default 0.4; of a processor it is measured)
  --measure         a few real steps here, in a process that may die of memory; their time is used
  --fit             the same, and the largest train.micro_batch that fits; batch size and learning rate stay
  --what-if         the same run on other devices, and the presets
With data.paths the tokens are counted where their cache exists, else estimated from a sample. Prices come from
budget.usd_per_hour. Exit 0: go; 77: no-go, with what would make it go.
""",
    "doctor": """\
usage: lamp doctor [run.yaml] [--preset NAME] [--only NAME ...] [--json] [--print-config] [--runs-dir DIR]
                   [--section.key value ...]

Looks at everything that a run needs, each probe in a process of its own with a deadline, and goes on past a failure.
Nothing of yours is changed or killed. Exit 0: no fault; 1: a fault, with verdict, why and next.

  --only NAME...    the probes whose name holds one of the words, such as environment, disk, collectives
  --json            ok, seconds, probes, findings, advice
  --print-config    the run.yaml with the advice applied, each change with its reason
""",
    "selftest": """\
usage: lamp selftest [--gpu] [--test] [--json] [--out FILE] [--runs-dir DIR]

Tries the promises on this very machine, in about three minutes: a run that is killed and resumed against one that is not,
saves beside the steps, the same words as transformers, attention against float64, speed, memory against the plan, planted
faults of a device. Nothing of yours is touched. Exit 0: nothing failed; 1: something did, with verdict, why and next.

  --gpu             on the GPU (else on the CPU); also what exact kernels cost there, which train.exact auto goes by
  --test            the quick form: half a minute on a CPU
  --out FILE        the table as a text file without paths, names and secrets (default: lamplighter-selftest.txt)
""",
    "data": """\
usage: lamp data stats   [run.yaml|CACHE] [--preset NAME] [--json] [--out DIR] [--val PATH ...] [--sample-mb MB]
                         [--near-documents N] [--runs-dir DIR] [--section.key value ...]
       lamp data clean   PATH... --out DIR [--dry-run] [--language en|any|en,de] [--json] [--runs-dir DIR]
                         [flags below]
       lamp data prepare [run.yaml] [--preset NAME] [--json] [--runs-dir DIR] [--section.key value ...]

stats    documents, true tokens, lengths, padding of each strategy, duplicates, advice; of text, of instruction rows
         with their template, or (lengths and repeats only) of a token cache
  --val PATH...         a test set of yours: what of it stands in the training text, by hash and by 8-word runs
  --sample-mb MB        look at a part only, spread over the whole; every figure says so
  --near-documents N    look for near duplicates among at most so many documents (default 50000; 0: do not)
  --out DIR             where stats.json, stats.txt and lengths.svg go (default: RUNS-DIR/.stats/NAME)
clean    raw files to clean documents (JSONL), with every rejected one in a log (docs/cleaning.md has every rule)
           files, folders, patterns: .txt .md .jsonl .json .xml (TEI, ALTO) .html, also .gz .zst; any encoding;
           .csv .tsv .parquet where they are named outright (column --text-key)
           takes off Project Gutenberg's headers, licences, credits and notes; joins wrapped lines; never rewrites a word
           --dry-run           write nothing; show what would change, before and after
           --out DIR           clean-00000.jsonl ... for lamp train --data.paths DIR, and log/
           --workers N         processes (default: all cores); the output is the same for any number
           --language any      or the languages to keep, such as en or en,fr
           --min-quality 0     0 to 1: reject documents whose worst measure scores no more than this
           --min-words 10      reject shorter documents
           --near 0.8          likeness from which two documents are one; 0: exact copies only
           --keep-duplicates   --keep-lines (do not join)   --split auto|div|file (TEI)
           --text-key text     --separator TEXT (documents within a text file)
           --max-document-mb 64   --shard-mb 256
           --bad-files refuse  end with 65 at a file that cannot be read to its end (default: all of it left out, counted, named)
prepare  the tokenizer and the token cache that `lamp train` with the same settings would make
""",
    "tokenizer": """\
usage: lamp tokenizer train [run.yaml] --out DIR [--preset NAME] [--special TOKEN ...] [--compare DIR ...] [--force]
                            [--json] [--runs-dir DIR] [--tokenizer.vocab_size N] [--section.key value ...]
       lamp tokenizer show  DIR|RUN|FILE [FILE ...] [--text TEXT] [--compare DIR ...] [--sample-mb MB] [--json]
                            [--runs-dir DIR] [--data.paths PATH ...] [--section.key value ...]

train    a byte-level BPE from any source, of any size, checked by a round trip over the data
  --out DIR           where it goes; opens with transformers and with --tokenizer.path DIR
  --special TOKEN...  control tokens, such as "<|im_start|>" "<|im_end|>"; they count in tokenizer.vocab_size
  --compare DIR...    other tokenizers, measured on the same text
  --force             replace another tokenizer that is in DIR (its files are kept in a folder below)
show     what it is, how it cuts a text, bytes per token, how much of the vocabulary a text uses
  FILE..., --data.paths PATH...    text to measure it on, at most --sample-mb of it (default 50)
""",
}
