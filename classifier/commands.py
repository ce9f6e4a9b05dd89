"""Commands that a shell line may start with."""

COMMANDS = (
    "git|docker|docker-compose|kubectl|helm|npm|npx|yarn|pnpm|pip3?|conda|cargo|go|apt|apt-get|brew|yum|dnf|sudo|curl|wget|ssh|scp|"
    "rsync|systemctl|journalctl|chmod|chown|tar|grep|egrep|sed|awk|find|xargs|ls|cat|cd|cp|mv|rm|mkdir|ln|ps|kill|df|du|ffmpeg|"
    "terraform|ansible|aws|gcloud|az|psql|mysql|redis-cli|make|cmake|gcc|g\\+\\+|clang|python3?|node|java|javac|openssl|nmap|"
    "tcpdump|iptables|crontab|pytest|mvn|gradle|dotnet|rustc|jq|tail|head|sort|echo|export|source"
)
